"""Finds the residual branches in a model's graph, and the batch norms that they end in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from tf_largebatch.core.errors import ConfigurationError

# Behind a batch norm that is zero these are zero, and let its gradient through; a rectifier is and
# does not.
_LINEAR = (
    keras.layers.Dropout,
    keras.layers.SpatialDropout1D,
    keras.layers.SpatialDropout2D,
    keras.layers.SpatialDropout3D,
    keras.layers.Identity,
)
_LINEAR_BY_NAME = ("StochasticDepth", "DropPath")  # Keras has none, users and libraries have


def last_norms_of_branches(model: Any, *, instead: str) -> list[Any]:
    """The batch norms that residual branches end in, each once, in the order of the graph.

    Args:
        model: a built functional or sequential model.
        instead: what to do where the graph does not tell, for the error.

    Raises:
        ConfigurationError: the graph does not tell.
    """
    _refuse_hidden_norms(model, instead)
    found: dict[int, Any] = {}
    shortcuts: dict[int, Any] = {}
    for graph in _graphs(model):
        for node in _sums(graph):
            branches, shortcut = _branches_of(node, instead)
            found.update((id(norm), norm) for norm in map(_last_norm, branches) if norm is not None)
            norm = None if shortcut is None else _last_norm(shortcut)
            if norm is not None:
                shortcuts[id(norm)] = norm
    for key in found.keys() & shortcuts.keys():
        raise ConfigurationError(
            f"{found[key].name} ends a residual branch and a shortcut as well. {instead}"
        )
    return list(found.values())


def _is_graph(operation: Any) -> bool:
    """Whether this is a model whose layers and connections are known: functional or sequential."""
    is_model = isinstance(operation, keras.Sequential) or (
        # Subclasses made with `inputs` and `outputs` are functional too, and may call otherwise.
        isinstance(operation, keras.Model) and hasattr(operation, "operations")
    )
    return is_model and bool(getattr(operation, "outputs", None))


def _graphs(model: Any) -> Iterator[Any]:
    """The model and all graphs nested in it, each once, in order."""
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        graph = waiting.pop(0)
        if id(graph) not in seen and _is_graph(graph):
            seen.add(id(graph))
            yield graph
            waiting.extend(graph.layers)


def _refuse_hidden_norms(model: Any, instead: str) -> None:
    """Batch norms within layers that have no graph: subclassed models, blocks, wrappers."""
    if not _is_graph(model):
        raise ConfigurationError(
            f"Model {model.name}, a {type(model).__name__}, has no graph of layers to look at. "
            f"{instead}"
        )
    for graph in _graphs(model):
        for layer in graph.layers:
            if not _is_graph(layer) and any(
                isinstance(inner, keras.layers.BatchNormalization)
                for inner in layer._flatten_layers(include_self=False)
            ):
                raise ConfigurationError(
                    f"{layer.name}, a {type(layer).__name__}, has batch norms within and no graph "
                    f"to look at. {instead}"
                )


def _node_of(tensor: Any) -> Any:
    """The call that made a symbolic tensor, of which Keras keeps account in private attributes."""
    history = tensor._keras_history
    return history.operation._inbound_nodes[history.node_index]


def _ancestors(tensors: Any) -> dict[int, Any]:
    """{id: node} of all calls that `tensors` depend on, theirs included, the last ones first."""
    nodes: dict[int, Any] = {}
    waiting = [_node_of(tensor) for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if id(node) not in nodes:
            nodes[id(node)] = node
            waiting.extend(_node_of(tensor) for tensor in node.input_tensors)
    return nodes


def _sums(graph: Any) -> list[Any]:
    """The calls that add two or more tensors of a graph, first to last."""
    nodes = _ancestors(graph.outputs)
    return [
        node
        for operation in getattr(graph, "operations", ())  # a sequential model adds nothing
        if type(operation).__name__ == "Add"
        for node in operation._inbound_nodes
        if id(node) in nodes and len(node.input_tensors) > 1
    ]


def _branches_of(node: Any, instead: str) -> tuple[list[Any], Any]:
    """The tensors that residual branches end in, and the shortcut's, of the inputs of a sum.

    None and no shortcut where no batch norm is at stake, or the inputs do not part from a place.
    """
    tensors = node.input_tensors
    paths = [_ancestors([tensor]) for tensor in tensors]
    shared = set.intersection(*(set(path) for path in paths))
    if not shared or all(_last_norm(tensor) is None for tensor in tensors):
        return [], None
    kernels = [sum(_kernels(path[key].operation) for key in path.keys() - shared) for path in paths]
    if kernels.count(min(kernels)) > 1:
        raise ConfigurationError(
            f"At {node.operation.name} it is not clear which path is the shortcut: those that end "
            f"in {' and '.join(_node_of(tensor).operation.name for tensor in tensors)} have "
            f"{' and '.join(map(str, kernels))} kernels. {instead}"
        )
    shortcut = kernels.index(min(kernels))
    return [*tensors[:shortcut], *tensors[shortcut + 1 :]], tensors[shortcut]


def _kernels(operation: Any) -> int:
    """How many kernels (weights of two axes or more) an operation has."""
    return sum(len(weight.shape) > 1 for weight in getattr(operation, "weights", ()))


def _last_norm(tensor: Any) -> Any:
    """The batch norm that a tensor comes from, straight or through what is linear; or None."""
    node = _node_of(tensor)
    operation = node.operation
    if isinstance(operation, keras.layers.BatchNormalization):
        return operation
    if _is_graph(operation):
        return _last_norm(operation.outputs[tensor._keras_history.tensor_index])
    # A product is that of squeeze-and-excitation: its gate comes from an activation.
    names = (*_LINEAR_BY_NAME, "Multiply")
    if isinstance(operation, _LINEAR) or type(operation).__name__ in names:
        norms = [_last_norm(each) for each in node.input_tensors]
        norms = [norm for norm in norms if norm is not None]
        return norms[0] if len(norms) == 1 else None
    return None
