"""Backward of a stage in two parts: the gradient of the input, which other ranks wait for, and those of the weights.

The method is described by Qi et al. 2023 (arXiv 2401.10241), section 2. The first part computes the gradients of all
activations, and stops in front of the parameters. The second part computes the gradients of the parameters of each node
of autograd's graph, without computing gradients of activations again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class WeightGradients(NamedTuple):
    """The gradients of a node's parameters, which remain to be computed."""

    edges: list[GradientEdge]
    """Outputs of the node."""
    gradients: list[Tensor]
    """Gradients of these outputs."""
    parameters: list[Tensor]

    def accumulate(self) -> None:
        """Compute the gradients of the parameters, and add them to the parameters' `.grad`."""
        torch.autograd.backward(self.edges, self.gradients, inputs=self.parameters)


def compute_input_gradient(
    x: Tensor, output: Tensor, gradient: Tensor | None, *, is_wanted: bool
) -> tuple[Tensor | None, list[WeightGradients]]:
    """Return the gradient of x if it is wanted and not zero, and the gradients that remain to be computed.

    `output` is computed from x and from parameters. `gradient` is the gradient of `output`, or None if `output` is a
    loss. The gradients of parameters that several nodes use are computed at once, because they cannot be separated.
    """
    if not output.requires_grad:
        return None, []
    root = get_gradient_edge(output)
    input_node = get_gradient_edge(x).node if x.requires_grad else None
    nodes = find_dependent_nodes(root.node, input_node)
    excluded = {*nodes} if input_node is None else {*nodes, input_node}
    parameters = {node: list_parameters(node, excluded) for node in nodes}
    uses = Counter(parameter for node in nodes for parameter in parameters[node])
    shared = [parameter for parameter, count in uses.items() if count > 1]

    edges: list[GradientEdge] = []
    for edge in list_edges(root, nodes):
        if any(uses[parameter] == 1 for parameter in parameters[edge.node]):
            edges.append(edge)
    inputs = [get_gradient_edge(tensor) for tensor in ([x, *shared] if is_wanted else shared)]
    if not inputs and not edges:  # the first stage may have no parameters
        return None, []
    outputs = torch.autograd.grad(output, [*inputs, *edges], gradient, retain_graph=True, allow_unused=True)
    gradients = outputs[len(inputs) :]
    for parameter, shared_gradient in zip(shared, outputs[len(inputs) - len(shared) :], strict=False):
        add_gradient(parameter, shared_gradient)

    remaining: dict[Node, WeightGradients] = {}
    for edge, edge_gradient in zip(edges, gradients, strict=True):
        if edge_gradient is None:  # the output of the model does not depend on this output of the node
            continue
        own_parameters = [parameter for parameter in parameters[edge.node] if uses[parameter] == 1]
        part = remaining.setdefault(edge.node, WeightGradients([], [], own_parameters))
        part.edges.append(edge)
        part.gradients.append(edge_gradient)
    return outputs[0] if is_wanted else None, list(remaining.values())


def add_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Add a gradient to the parameter's `.grad`."""
    if gradient is not None:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def list_children(node: Node) -> list[Node]:
    """Return the nodes to which a node passes gradients."""
    return [child for child, _ in node.next_functions if child is not None]


def find_dependent_nodes(root: Node, input_node: Node | None) -> list[Node]:
    """Return the nodes from which gradients flow from `root` to `input_node`, both directly and through other nodes.

    Without an input node, the result contains only `root`. The order depends only on the graph: ranks with equal graphs
    may communicate in the gradients of parameters, and must do so in the same order.
    """
    parents: dict[Node, list[Node]] = {root: []}
    pending = [root]
    while pending:
        node = pending.pop()
        for child in list_children(node):
            if child not in parents:
                parents[child] = []
                pending.append(child)
            parents[child].append(node)

    dependent_nodes = {root: None}  # a set that keeps its order
    pending = parents.get(input_node, []) if input_node is not None else []
    while pending:
        node = pending.pop()
        if node not in dependent_nodes:
            dependent_nodes[node] = None
            pending += parents[node]
    return list(dependent_nodes)


def list_edges(root: GradientEdge, nodes: Iterable[Node]) -> list[GradientEdge]:
    """Return the outputs of nodes that receive gradients from `root` or from other nodes, each of them once."""
    outputs = {(root.node, root.output_nr): root}
    nodes = list(nodes)
    known_nodes = set(nodes)
    for node in nodes:
        for child, number in node.next_functions:
            if child in known_nodes:
                outputs[child, number] = GradientEdge(child, number)
    return list(outputs.values())


def list_parameters(node: Node, excluded: set[Node]) -> list[Tensor]:
    """Return the parameters that receive gradients from a node, but not through excluded nodes."""
    parameters: list[Tensor] = []
    visited: set[Node] = set()
    pending = list_children(node)
    while pending:
        child = pending.pop()
        if child in visited or child in excluded:
            continue
        visited.add(child)
        variable = getattr(child, "variable", None)
        if isinstance(variable, Tensor):
            parameters.append(variable)
        pending += list_children(child)
    return parameters
