"""Runs that grow by rules: step workflows, follow-ups by role, and policies of your own."""

from __future__ import annotations

from plait.runner.client.runs import load_progress
from plait.runner.domain.policy import Decision, Policy, RecordedRun
from plait.runner.policies.follow_ups import FollowUp, FollowUps
from plait.runner.policies.step_workflow import Interaction, Step, Workflow, WorkflowComplete, WorkflowProgress

__all__ = [
    "Decision",
    "FollowUp",
    "FollowUps",
    "Interaction",
    "Policy",
    "RecordedRun",
    "Step",
    "Workflow",
    "WorkflowComplete",
    "WorkflowProgress",
    "load_progress",
]
