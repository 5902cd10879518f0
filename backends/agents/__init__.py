"""Coding agents as backends: Claude Code, Codex, Gemini."""
