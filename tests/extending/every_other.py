# A compressor from outside of gradsync: in even steps the even elements, in odd steps the odd ones.
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gradsync.compress.param import Param
from gradsync.compress.recipe import Codec
from gradsync.compress.rounds import CodedBucket, Compute, Sum


@dataclass(frozen=True)
class EveryOther(Codec):
    """Half of the elements at a time; in `gs.error_feedback(EveryOther())` the other half waits for its turn."""

    name = "every_other"

    def nbytes(self, param: Param) -> int:
        return 4 * -(-param.numel // 2)

    def rounds(self, bucket: CodedBucket) -> Iterator[Compute | Sum]:
        payload = bucket.numbers(-(-bucket.numel // 2), torch.float32)

        def encode(step: int) -> None:
            gradient = bucket.flat if bucket.residual is None else bucket.residual.add_(bucket.flat)
            sent = gradient[step % 2 :: 2]
            payload.tensor[: len(sent)].copy_(sent)
            sent.zero_()  # in the residual: it is on its way

        def decode(step: int) -> None:
            received = bucket.flat.zero_()[step % 2 :: 2]
            received.copy_(payload.tensor[: len(received)])

        yield Compute(encode, encode=1)
        yield Sum(payload)
        yield Compute(decode, decode=1)
