"""Coding agents as backends: Claude Code, Codex, Gemini, and agents that speak ACP."""
