"""For torch.compile: what a layer adds to its MLP's result is added by the MLP's last kernel, where that is one of ours."""

from torch import fx, ops
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_VIEWS = (ops.aten.reshape.default, ops.aten.view.default)


class JoinedResiduals(CustomGraphPass):
    """Gives `quantized_gated_mlp` the rows that its result is added to."""

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))

    def __call__(self, graph: fx.Graph) -> None:
        for mlp in graph.find_nodes(
            op="call_function", target=ops.sleepserve.quantized_gated_mlp.default
        ):
            view = _only_user(mlp)
            if view is None or view.target not in _VIEWS:
                continue
            add = _only_user(view)
            if add is None or add.target is not ops.aten.add.Tensor or add.kwargs:
                continue
            residual = add.args[1] if add.args[0] is view else add.args[0]
            if not isinstance(residual, fx.Node) or not _are_alike(residual, view):
                continue
            width = mlp.meta["val"].shape[-1]
            with graph.inserting_before(add):
                rows = graph.call_function(ops.aten.reshape.default, (residual, [-1, width]))
                joined = graph.call_function(mlp.target, (*mlp.args, rows), mlp.kwargs)
                whole = graph.call_function(ops.aten.reshape.default, (joined, view.args[1]))
            add.replace_all_uses_with(whole)
            for node in (add, view, mlp):
                graph.erase_node(node)


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _are_alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether they add up without being broadcast or converted."""
    first, second = one.meta["val"], other.meta["val"]
    return bool(first.shape == second.shape and first.dtype == second.dtype)
