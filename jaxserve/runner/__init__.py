"""Runs Plans on the device: `prepare` packs a Plan, `step` is the traced function, `sampling` picks tokens, `compile` makes the
programs before the first request, `memory` says how many pages there are, and `runner` ties them together.
"""
