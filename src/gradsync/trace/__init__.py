"""The record of what happened, kept as it happens; imports nothing of ours."""

from gradsync.trace.recorder import Recorder, StepRecord

__all__ = ["Recorder", "StepRecord"]
