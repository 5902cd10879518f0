"""plait: run a DAG of LLM subtasks in parallel, write every step down, resume after a crash."""
