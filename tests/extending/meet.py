# A pace from outside of gradsync: each rank steps by itself, and every `steps` steps parameters become their mean.
from dataclasses import dataclass

import torch

from gradsync.exchange.flat_sets import FlatSet
from gradsync.pace.after_step import AfterStep
from gradsync.pace.averages import finish_mean, launch_mean
from gradsync.pace.contract import PaceContext, SavedPace


@dataclass(frozen=True)
class Meet:
    steps: int  # from one mean to the next; a planner reads it too

    def open(self, context: PaceContext) -> "MeetPace":
        return MeetPace(self, context)


class MeetPace(AfterStep):
    def __init__(self, pace: Meet, context: PaceContext) -> None:
        super().__init__(context)
        self._pace, self._flat_set = pace, FlatSet(self._trained.named, context.exact, context.sender, context.indices)

    def _is_time(self) -> bool:
        return self._clock % self._pace.steps == 0

    @torch.no_grad()
    def _act(self) -> None:
        context, params, flat_part = self._context, self._trained.params, self._flat_set.flat_parts[0]
        torch._foreach_copy_(flat_part.views, torch._foreach_div(params, context.lane.groups.size))
        finish_mean(context, self._flat_set, launch_mean(context, self._flat_set, flat_part, clock=self._clock))
        torch._foreach_copy_(params, flat_part.views)

    def state(self) -> SavedPace:
        return SavedPace({"Meet.clock": torch.tensor(self._clock)}, {})

    def load(self, saved: SavedPace) -> None:
        self._flat_set.register()
        self._clock = int(saved.shared["Meet.clock"])
