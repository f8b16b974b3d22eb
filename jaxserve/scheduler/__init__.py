"""Decides at every step which sequences compute how many tokens in which pages. Plain Python, no JAX.

Read in this order: `scheduler`, `roster`, `planner`, `results`, `step_draft`, `sequence_pages`, `waiting_queue`, `prompt_share`, `arrival`,
`stopping`, `prompt_logprobs`, `pooling`, `token_events`, `preemption_log`, `integrity`.
"""
