"""Coding agents as backends: Claude Code, Codex, and agents that speak ACP."""
