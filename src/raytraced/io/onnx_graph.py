"""ONNX graphs after torch has written them: empty batches, and what the inputs mean. Imports onnx only when it is used."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto

# What the inputs beside the images are, for runtimes that show it.
MEANINGS = {
    "max_experts": "The largest number of experts per image; a negative number counts as 0.",
    "route": "The experts that run: 1 for each of them, 0 for the others; any other number counts as 1.",
}


def accept_empty_batches(model: "ModelProto") -> None:
    """Add one row of zeros to an empty batch inside an ONNX graph, and take its row from the outputs.

    ONNX Runtime divides by zero where some operators (Einsum) get an empty batch, which ends the process.
    """
    from onnx import TensorProto, helper

    graph = model.graph
    rows = [value for value in graph.input if value.name != "max_experts"]
    padded = {value.name: f"padded_{value.name}" for value in (*rows, *graph.output)}
    rename_values(graph, padded)
    graph.initializer.append(helper.make_tensor("first_row", TensorProto.INT64, [1], [0]))
    before = [
        helper.make_node("Shape", ["images"], ["batch_size"], end=1),
        helper.make_node("Equal", ["batch_size", "first_row"], ["is_empty"]),
        helper.make_node("Cast", ["is_empty"], ["num_padding"], to=TensorProto.INT64),
        *(node for value in rows for node in _pad(graph, value)),
    ]
    after = [
        helper.make_node("Slice", [padded[output.name], "first_row", "batch_size", "first_row"], [output.name])
        for output in graph.output
    ]
    nodes = [*before, *graph.node, *after]
    del graph.node[:], graph.value_info[:]  # shapes that were inferred before
    graph.node.extend(nodes)
    for value in graph.input:
        value.doc_string = MEANINGS.get(value.name, "")


def _pad(graph: "GraphProto", value: "ValueInfoProto") -> list["NodeProto"]:
    """Nodes that add `num_padding` rows of zeros to an input, under the name padded_NAME."""
    from onnx import TensorProto, helper

    name, kind = value.name, value.type.tensor_type
    shape = [size.dim_value for size in kind.shape.dim[1:]]
    graph.initializer.append(helper.make_tensor(f"{name}_shape", TensorProto.INT64, [len(shape)], shape))
    zero = helper.make_tensor("zero", kind.elem_type, [1], [0])
    return [
        helper.make_node("Concat", ["num_padding", f"{name}_shape"], [f"{name}_padding_shape"], axis=0),
        helper.make_node("ConstantOfShape", [f"{name}_padding_shape"], [f"{name}_padding"], value=zero),
        helper.make_node("Concat", [name, f"{name}_padding"], [f"padded_{name}"], axis=0),
    ]


def rename_values(graph: "GraphProto", names: dict[str, str]) -> None:
    """Rename values in all nodes of an ONNX graph, those of its loops included."""
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(value, value) for value in values]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                rename_values(attribute.g, names)
