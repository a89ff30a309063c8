"""The four files and their folder are what the contract says, read back with onnx and ONNX Runtime."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper
from synthetic_checkpoint import CHAT_TEMPLATE, Sizes, tensors
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, Phi4MultimodalConfig


NAMES = ("vision", "speech", "embedding", "model")
FLOATS = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
NEUTRAL_FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
ADAPTER_FILES = {"vision.onnx_adapter", "speech.onnx_adapter", "text.onnx_adapter"}
SIZES = Sizes()

# Design section 1; F stands for the export's float type, a name for an axis of any length.
F = "F"
CACHE = {
    f"past_key_values.{layer}.{part}": (F, ["batch", SIZES.kv_heads, "past_seq", SIZES.head_size])
    for layer in range(SIZES.layers)
    for part in ("key", "value")
}
PRESENT = {
    name.replace("past_key_values", "present"): (F, ["batch", SIZES.kv_heads, "total_seq", SIZES.head_size])
    for name in CACHE
}
REQUIRED = {
    "vision": {"pixel_values": (F, ["batch", 3, 448, 448])},
    "speech": {"audio_features": (F, ["batch", "audio_seq_len", 80])},
    "embedding": {
        "input_ids": (TensorProto.INT64, ["batch", "seq_len"]),
        "image_features": (F, ["num_image_tokens", SIZES.hidden]),
        "speech_features": (F, ["num_audio_tokens", SIZES.hidden]),
    },
    "model": {
        "inputs_embeds": (F, ["batch", "seq_len", SIZES.hidden]),
        "attention_mask": (TensorProto.INT64, ["batch", "past_seq + seq"]),
        "position_ids": (TensorProto.INT64, ["batch", "seq_len"]),
        **CACHE,
    },
}
OPTIONAL = {
    "vision": {
        "image_sizes": (TensorProto.INT64, ["num_images", 2], np.zeros((0, 2), np.int64)),
        "image_attention_mask": (TensorProto.BOOL, ["mask_rows", 32, 32], np.zeros((0, 32, 32), bool)),
    },
    "speech": {
        "audio_attention_mask": (TensorProto.BOOL, ["num_audios", "mask_len"], np.zeros((0, 0), bool)),
    },
    "embedding": {},
    "model": {
        "adapter_gates": (TensorProto.FLOAT, ["gate_rows", 2], np.ones((1, 2), np.float32)),
        "logits_to_keep": (TensorProto.INT64, [1], np.zeros(1, np.int64)),
    },
}
OUTPUTS = {
    "vision": {"image_features": (F, ["num_image_tokens", SIZES.hidden])},
    "speech": {
        "speech_features": (F, ["num_audio_tokens", SIZES.hidden]),
        "speech_features_for_vision": (F, ["num_audio_tokens", SIZES.hidden]),
    },
    "embedding": {"inputs_embeds": (F, ["batch", "seq_len", SIZES.hidden])},
    "model": {"logits": (F, ["batch", "logits_seq", SIZES.vocabulary]), **PRESENT},
}
PREFIXES = {
    "vision": ("vision_encoder.",),
    "speech": ("speech_encoder.",),
    "embedding": ("embedding.",),
    "model": ("decoder.",),
}
LARGEST_DERIVED = 33 * 32 * 8  # bytes: the table of position ids is the largest


def described(value: onnx.ValueInfoProto) -> tuple[int, list[int | str]]:
    """Element type and axes of an input or output."""
    tensor = value.type.tensor_type
    return tensor.elem_type, [axis.dim_param or axis.dim_value for axis in tensor.shape.dim]


def with_float(table: dict[str, tuple], float_type: int) -> dict[str, tuple]:
    return {name: (float_type if entry[0] == F else entry[0], *entry[1:]) for name, entry in table.items()}


def graph(package, name: str) -> onnx.GraphProto:
    """A graph without its weights."""
    return onnx.load(package[name].path, load_external_data=False).graph


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_inputs_have_the_names_types_and_axes_of_the_contract(export_package, dtype, name):
    model = graph(export_package(dtype=dtype), name)
    optional = with_float(OPTIONAL[name], FLOATS[dtype])
    expected = with_float(REQUIRED[name], FLOATS[dtype]) | {key: entry[:2] for key, entry in optional.items()}
    assert {value.name: described(value) for value in model.input} == {
        key: (kind, axes) for key, (kind, axes) in expected.items()
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_outputs_have_the_names_types_and_axes_of_the_contract(export_package, dtype, name):
    found = {value.name: described(value) for value in graph(export_package(dtype=dtype), name).output}
    assert found == with_float(OUTPUTS[name], FLOATS[dtype])


@pytest.mark.parametrize("name", NAMES)
def test_optional_inputs_are_initialisers_with_the_defaults_of_the_contract(package, name):
    model = graph(package, name)
    defaults = {tensor.name: tensor for tensor in model.initializer}
    inputs = {value.name for value in model.input}
    assert inputs & set(defaults) == set(OPTIONAL[name])
    for optional, (kind, _, default) in OPTIONAL[name].items():
        assert defaults[optional].data_type == kind
        found = numpy_helper.to_array(defaults[optional])
        assert found.shape == default.shape
        np.testing.assert_array_equal(found, default)


@pytest.mark.parametrize("optimized", [True, False], ids=["optimised", "unoptimised"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("name", NAMES)
def test_onnx_runtime_loads_every_graph_and_asks_for_the_required_inputs_only(
    export_package, session, name, dtype, optimized
):
    running = session(export_package(dtype=dtype), name, optimized)
    assert {value.name for value in running.get_inputs()} == set(REQUIRED[name])
    assert {value.name for value in running.get_overridable_initializers()} == set(OPTIONAL[name])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_the_checker_accepts_every_graph(export_package, name, dtype):
    onnx.checker.check_model(export_package(dtype=dtype)[name].path, full_check=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_only_onnx_own_operators_are_used(export_package, name, dtype):
    model = onnx.load(export_package(dtype=dtype)[name].path, load_external_data=False)
    assert {opset.domain for opset in model.opset_import} == {""}
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions
    if dtype == "bf16":
        assert model.opset_import[0].version >= 22  # Conv takes bfloat16 from there on


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_weights_lie_in_one_file_beside_the_graph_and_each_only_once(export_package, name, dtype):
    path = export_package(dtype=dtype)[name].path
    model = onnx.load(path, load_external_data=False)
    places = []
    for tensor in model.graph.initializer:
        external = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_location == TensorProto.EXTERNAL:
            assert external["location"] == f"{name}.onnx_data"
            places.append((int(external["offset"]), int(external["length"])))
    places.sort()
    for (offset, length), (following, _) in itertools.pairwise(places):
        assert offset + length <= following
    assert path.stat().st_size < 2_000_000  # what isn't external is small
    data = path.with_name(f"{name}.onnx_data").read_bytes()
    assert len(data) - sum(length for _, length in places) < 65536 * len(places)  # alignment, nothing else
    large = [data[offset : offset + length] for offset, length in places if length >= 1024]
    contents = [hashlib.sha256(content).hexdigest() for content in large]
    assert len(set(contents)) == len(contents)


def test_every_weight_is_found_under_its_name_and_what_else_is_stored_is_small(package):
    expected = {name: set() for name in NAMES}
    last = f".encoder.layers.{SIZES.vision_layers - 1}."
    for tensor in tensors(SIZES):
        key = tensor.name.replace("base_layer.", "")
        if key.startswith("model.embed_tokens_extend.image_embed."):
            if last in key or ".post_layernorm." in key or ".head." in key:
                continue
            expected["vision"].add(re.sub(r"^.*image_embed\.", "vision_encoder.", key))
        elif key.startswith("model.embed_tokens_extend.audio_embed."):
            expected["speech"].add(re.sub(r"^.*audio_embed\.", "speech_encoder.", key))
        elif key == "model.embed_tokens.weight":
            expected["embedding"].add("embedding.embed_tokens.weight")
            expected["model"].add("decoder.lm_head.weight")  # tied
        else:
            expected["model"].add(re.sub(r"^model\.", "decoder.", key))
    for name in NAMES:
        model = graph(package, name)
        optional = {value.name for value in model.input}
        stored = {tensor.name: tensor for tensor in model.initializer if tensor.name not in optional}
        found = set()
        for initializer, tensor in stored.items():
            owners = [
                key for key in expected[name] if initializer == key or initializer.startswith(key + ".")
            ]
            if not owners:
                assert int(np.prod(tensor.dims)) * 8 <= LARGEST_DERIVED, f"{initializer} in {name} is unknown"
            found |= set(owners)
        assert found == expected[name]


@pytest.mark.parametrize(
    ("variant", "dtype", "layout"),
    [
        ("gated", "fp32", "phi4mm"),
        ("gated", "fp32", "phi4_multimodal"),
        ("gated", "bf16", "phi4mm"),
        ("merged", "fp32", "phi4mm"),
        ("text", "fp32", "phi4mm"),
    ],
)
def test_the_folder_holds_the_contracts_files_and_no_other(export_package, variant, dtype, layout):
    folder = export_package(variant=variant, dtype=dtype, layout=layout)["model"].path.parent
    expected = NEUTRAL_FILES | {f"{name}.onnx{suffix}" for name in NAMES for suffix in ("", "_data")}
    if variant == "gated":
        expected |= ADAPTER_FILES
    found = {path.name for path in folder.iterdir()}
    assert found - {"chat_template.jinja"} == expected
    assert all(path.is_file() and not path.is_symlink() for path in folder.iterdir())
    assert AutoTokenizer.from_pretrained(folder).chat_template == CHAT_TEMPLATE


def test_the_package_says_what_the_files_say(package):
    assert set(package) == set(NAMES)
    for name in NAMES:
        assert package[name].path.name == f"{name}.onnx"
        assert set(package[name].inputs) == set(REQUIRED[name]) | set(OPTIONAL[name])
        assert set(package[name].outputs) == set(OUTPUTS[name])


def test_validation_reports_a_small_difference_for_every_output(package):
    for name in NAMES:
        assert set(package[name].differences) == set(OUTPUTS[name])
        assert all(0 <= difference < 1e-2 for difference in package[name].differences.values())


def test_no_validation_reports_no_difference(export_package):
    package = export_package(variant="text")
    assert [package[name].differences for name in NAMES] == [None] * 4


@pytest.mark.parametrize("layout", ["phi4mm", "phi4_multimodal"])
def test_the_native_config_is_read_without_remote_code(export_package, checkpoint, reference, layout):
    folder = export_package(layout=layout)["model"].path.parent
    config = AutoConfig.from_pretrained(folder)
    assert type(config) is Phi4MultimodalConfig
    ignored = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
    found, expected = config.to_dict(), reference.config.to_dict()
    differing = {
        key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)
    } - ignored
    for part in ("vision_config", "audio_config"):
        inner = {key for key in found[part] if found[part][key] != expected[part].get(key)} - ignored
        assert not inner, f"{part}: {inner}"
        differing.discard(part)
    source = json.loads((checkpoint(layout) / "config.json").read_text())
    if layout == "phi4mm":
        assert found["eos_token_id"] in (source["eos_token_id"], expected["eos_token_id"])
        differing.discard("eos_token_id")
    assert not differing
    text = "".join(path.read_text() for path in folder.glob("*.json") if path.name != "tokenizer.json")
    assert "auto_map" not in text
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == [SIZES.token("<|end|>"), SIZES.token("<|endoftext|>")]


@pytest.mark.parametrize("layout", ["phi4mm", "phi4_multimodal"])
def test_the_tokenizer_is_the_checkpoints(export_package, checkpoint, layout):
    tokenizer = AutoTokenizer.from_pretrained(export_package(layout=layout)["model"].path.parent)
    source = AutoTokenizer.from_pretrained(checkpoint("phi4_multimodal"))
    text = "<|user|>What is shown?\n<|endoftext10|>\n\n Grüße, 世界<|endoftext11|><|end|><|assistant|>"
    ids = tokenizer(text).input_ids
    assert ids == source(text).input_ids
    assert {200021, 200010, 200011, 200020, 200019} <= set(ids)
    assert tokenizer.decode(ids) == text
    assert (tokenizer.image_token_id, tokenizer.audio_token_id) == (200010, 200011)


@pytest.mark.parametrize("layout", ["phi4mm", "phi4_multimodal"])
def test_the_processor_files_name_transformers_own_classes(export_package, layout):
    folder = export_package(layout=layout)["model"].path.parent
    preprocessor = json.loads((folder / "preprocessor_config.json").read_text())
    assert preprocessor["image_processor_type"] == "Phi4MultimodalImageProcessorFast"
    assert preprocessor["feature_extractor_type"] == "Phi4MultimodalFeatureExtractor"
    assert preprocessor["processor_class"] == "Phi4MultimodalProcessor"
    assert preprocessor["dynamic_hd"] == 36
    processor = json.loads((folder / "processor_config.json").read_text())
    assert processor["processor_class"] == "Phi4MultimodalProcessor"


def test_the_adapter_files_hold_the_gates_and_little_else(package):
    gates = {"vision": [[1, 0]], "speech": [[0, 1]], "text": [[0, 0]]}
    for name, expected in gates.items():
        path = package["model"].path.with_name(f"{name}.onnx_adapter")
        assert path.stat().st_size < 1024
        parameters = onnxruntime.AdapterFormat.read_adapter(str(path)).get_parameters()
        assert set(parameters) == {"adapter_gates"}
        found = parameters["adapter_gates"].numpy()
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_both_layouts_give_the_same_graphs_byte_for_byte(export_package):
    found, expected = (
        digests(export_package(layout=layout)["model"].path.parent)
        for layout in ("phi4_multimodal", "phi4mm")
    )
    for name in NAMES:
        assert found[f"{name}.onnx"] == expected[f"{name}.onnx"]
        assert found[f"{name}.onnx_data"] == expected[f"{name}.onnx_data"]


@pytest.mark.parametrize("variant", ["merged", "text"])
def test_a_variant_differs_in_the_decoder_only(export_package, package, variant):
    other = export_package(variant=variant)
    for name in NAMES:
        data = [each[name].path.with_name(f"{name}.onnx_data").read_bytes() for each in (other, package)]
        graphs = [graph(each, name).SerializeToString() for each in (other, package)]
        same = name != "model"
        assert (data[0] == data[1]) == same
        assert (graphs[0] == graphs[1]) == same


def test_no_file_tells_where_and_when_it_was_made(package, original_checkpoint):
    folder = package["model"].path.parent
    places = {str(folder.parent), str(original_checkpoint), os.getcwd(), str(Path(__file__).parent.parent)}
    import optimum_phi4mm

    places |= {str(Path(optimum_phi4mm.__file__).parent), str(Path(onnx.__file__).parent.parent)}
    stamp = re.compile(rb"20[0-9]{2}-[01][0-9]-[0-3][0-9]")
    for path in folder.iterdir():
        if path.suffix == ".onnx_data":
            continue
        content = path.read_bytes()
        for place in places:
            assert place.encode() not in content, f"{path.name} holds {place}"
        if path.name != "tokenizer.json":
            assert not stamp.search(content), f"{path.name} holds {stamp.search(content)}"
