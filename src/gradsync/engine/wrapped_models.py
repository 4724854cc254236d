"""The refusal of a wrapper around what is attached: DistributedDataParallel would average its gradients once more.

Seen where the wrapper takes the model in, by PyTorch's own hook on the registration of modules; and, if the wrapper was
there before, in the first forward that comes through it.
"""

from __future__ import annotations

import weakref

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradsync.engine.user_hooks import hook_on

_TWICE = "DistributedDataParallel would average its gradients once more"


def refuse_wrappers(model: torch.nn.Module) -> RemovableHandle:
    """Let no such wrapper be made around what is attached, while `model` is there and the handle was not removed."""
    handle = register_module_module_registration_hook(_registered)
    weakref.finalize(model, handle.remove).atexit = False
    return handle


def check_wrapper() -> None:
    """Raise if a forward comes through a wrapper that averages what is attached."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None and any(_is_attached(param) for param in wrapper._module_parameters):
        raise ValueError(
            f"the model is attached to gradsync, but called through its wrapper, and {_TWICE}; call the model itself "
            "(ddp.module) and drop the wrapper, or call detach() on its GradSync"
        )


def _registered(parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    # Asked first: where a compiler wraps a module, Dynamo traces into this, and the wrapper is only half made.
    if torch.compiler.is_compiling() or not isinstance(parent, DistributedDataParallel) or child is None:
        return
    for key, param in child.named_parameters():
        if key not in parent.parameters_to_ignore and _is_attached(param):
            raise ValueError(
                f"parameter {key} is attached to gradsync, and {_TWICE}; leave the wrapper out, or call detach() on "
                "its GradSync first"
            )


def _is_attached(param: torch.Tensor) -> bool:
    hook = hook_on(param)
    return hook is not None and not hook.observes
