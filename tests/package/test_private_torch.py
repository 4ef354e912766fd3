"""All private names of torch that the package uses: a release may change them without notice."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from pathlib import Path

from tests.helpers.cells import in_one_item
from tests.helpers.house import parsed

PACKAGE = Path(__file__).resolve().parents[2] / "hf_zero"
# By the parent of the names. torch documents its `_foreach_` functions and the operators of aten.
PRIVATE = {
    "torch": "_has_compatible_shallow_copy_type",
    "torch.Tensor": "_make_subclass _make_wrapper_subclass _version",
    "torch._C": "DisableTorchFunctionSubclass _are_functorch_transforms_active "
    "_current_graph_task_id _dispatch_has_kernel_for_dispatch_key _dispatch_key_for_device "
    "_get_sdp_priority_order _has_storage _len_torch_dispatch_stack "
    "_set_sdp_priority_order _set_throw_on_mutable_data_ptr _storage_Use_Count "
    "_swap_tensor_impl _will_engine_execute_node",
    "torch._C._autograd": "_get_current_graph_task_keep_graph",
    "torch._C._dynamo.eval_frame": "_FrameAction _FrameExecStrategy set_code_exec_strategy",
    "torch._C._functorch": "TransformType get_interpreter_stack is_legacy_batchedtensor",
    "torch._C._nn": "unflatten_dense_tensors",
    "torch._dynamo.config": "patch recompile_limit",
    "torch._dynamo.utils": "counters",
    "torch._inductor": "list_mode_options",
    "torch._inductor.config": "triton",
    "torch.autograd": "_get_sequence_nr",
    "torch.autograd.Variable": "_execution_engine",
    "torch.autograd.profiler": "_is_profiler_enabled",
    "torch.distributed.distributed_c10d": "_get_default_store _world",
    "torch.distributed.elastic.multiprocessing.api.SubprocessContext": "_start",
    "torch.distributed.pipelining.schedules": "_batch_p2p",
    "torch.distributed.tensor.placement_types": "_StridedShard",
    "torch.nn.modules.batchnorm": "_BatchNorm",
    "torch.nn.modules.dropout": "_DropoutNd",
    "torch.nn.modules.instancenorm": "_InstanceNorm",
    "torch.nn.modules.module": "_EXTRA_STATE_KEY_SUFFIX _IncompatibleKeys _has_any_global_hook",
    "torch.optim._muon": "_adjust_lr _zeropower_via_newtonschulz",
    "torch.optim.optimizer": "_get_fused_kernels_supported_devices",
    "torch.testing._internal.distributed.fake_pg": "FakeStore",
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes "
    "is_traceable_wrapper_subclass",
    "torch.utils._pytree": "SUPPORTED_NODES tree_flatten tree_leaves tree_map tree_map_only",
    "torch.utils.data._utils.signal_handling": "_set_worker_signal_handlers",
}
NAMES = sorted(f"{parent}.{name}" for parent, names in PRIVATE.items() for name in names.split())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_foreach_"))


def resolved(name: str) -> object:
    """Return the object of a dotted name: modules, then attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        with suppress(ModuleNotFoundError):
            module = importlib.import_module(".".join(parts[:length]))
            return reduce(getattr, parts[length:], module)
    raise AssertionError(name)


def used(source: str) -> Iterator[str]:
    """Yield the private names of torch in ``source``, each up to the first that is no module."""
    roots = dict[str, str]()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                roots[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                roots[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    names = list(roots.values())
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if rest.replace(".", "_").isidentifier():
                names.append(f"{roots.get(root)}.{rest}")
    for name in names:
        parts = name.split(".")
        first = next((place for place, part in enumerate(parts, 1) if is_private(part)), None)
        if parts[0] != "torch" or first is None or name.startswith("torch.ops."):
            continue
        prefixes = [".".join(parts[:length]) for length in range(first, len(parts) + 1)]
        yield from [each for each in prefixes if not inspect.ismodule(resolved(each))][:1]


def test_the_private_names_of_torch_that_the_package_uses_are_listed() -> None:
    """Prefer a public name; where there is none, list the private one in ``PRIVATE``."""
    found = {name for path in PACKAGE.rglob("*.py") for name in used(path.read_text())}
    assert {*NAMES} ^ found == set()


@in_one_item(NAMES, named=str)
def test_this_release_of_torch_has(name: str) -> None:
    resolved(name)
