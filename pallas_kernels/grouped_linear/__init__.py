"""Rows sorted by expert times the experts' matrices. The entrance is `api`."""
