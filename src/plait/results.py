"""What is known of a run: its result, its tasks, why they wait, and what a resume, a fork or a reuse would do."""

from __future__ import annotations

from plait.runner.client.create_run import Fork
from plait.runner.client.reuse_preview import ReuseAction, ReusePreview, ReuseStep
from plait.runner.domain.asked_question import OpenQuestion
from plait.runner.domain.run_result import Degradation, ResumeSummary, RunResult, TaskResult
from plait.runner.domain.wait_reasons import WaitKind, WaitReason
from plait.runner.recovery.resume_plan import ResumeAction, ResumeStep
from plait.runner.views.view_models import (
    AttemptView,
    EventView,
    Preview,
    QuestionView,
    RunDetail,
    RunView,
    TaskDetail,
    TaskView,
    view_json,
)

__all__ = [
    "AttemptView",
    "Degradation",
    "EventView",
    "Fork",
    "OpenQuestion",
    "Preview",
    "QuestionView",
    "ResumeAction",
    "ResumeStep",
    "ResumeSummary",
    "ReuseAction",
    "ReusePreview",
    "ReuseStep",
    "RunDetail",
    "RunResult",
    "RunView",
    "TaskDetail",
    "TaskResult",
    "TaskView",
    "WaitKind",
    "WaitReason",
    "view_json",
]
