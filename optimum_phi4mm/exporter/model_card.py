"""The package's README.md (model card): what it is, what goes in and comes out, how far it is from torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from .configs import Phi4MMOnnxConfig
from .package import Package, PackagedModel, TensorInfo


__all__ = ["model_card"]

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_PURPOSES = {
    "vision": "pictures to features",
    "speech": "sound to features",
    "embedding": "token ids and features to embeddings",
    "model": "embeddings to logits, with a key-value cache",
}
_DEFAULTS = {
    "image_sizes": "no rows: each item is an image of one crop",
    "image_attention_mask": "no rows: no patch is padding",
    "audio_attention_mask": "no rows: no frame is padding",
    "adapter_gates": "[[1, 1]]",
    "logits_to_keep": "0: all",
}
# The cache is two tensors per layer, and one line of a table.
_CACHE = re.compile(r"(past_key_values|present)\.(\d+)\.(key|value)")

_GATES = """## Adapters

`adapter_gates` scales the vision adapter (column 0) and the speech adapter (column 1). The model was trained
with one setting for the whole generation, by what the prompt holds:

| prompt | `adapter_gates` | the same through ONNX Runtime's adapter API |
|---|---|---|
| pictures, with or without sound | [[1, 0]] | `vision.onnx_adapter` |
| sound only | [[0, 1]] | `speech.onnx_adapter` |
| text only | [[0, 0]] | `text.onnx_adapter` |

Left out, both adapters are active, which is none of these.
"""

# What a prompt of each variant holds beside its text: marker, argument, text.
_MEDIA = {
    "speech": ("<|audio_1|>", ', audio="recording.flac"', "Write down what is said."),
    "text": ("", "", "Hello!"),
}
_PICTURE = ("<|image_1|>", ', images="picture.jpg"', "What is it?")

_ANSWER = """from optimum_phi4mm import ORTModelForPhi4MM, Phi4MMProcessor  # optimum-phi4mm[media]

processor, model = Phi4MMProcessor.from_pretrained("."), ORTModelForPhi4MM.from_pretrained(".")
inputs = processor("<|user|>{marker}{text}<|end|><|assistant|>"{argument})
tokens = model.generate(**inputs, max_new_tokens=64)[:, inputs["input_ids"].shape[1] :]
print(processor.batch_decode(tokens, skip_special_tokens=True)[0])"""

_SNIPPET = """import numpy as np
import onnxruntime
from transformers import AutoTokenizer

prompt = "<|user|>Hello!<|end|><|assistant|>"
ids = AutoTokenizer.from_pretrained(".")(prompt, return_tensors="np")["input_ids"]
embedding, decoder = (onnxruntime.InferenceSession(f"{{name}}.onnx") for name in ("embedding", "model"))

absent = np.zeros((0, {hidden}), np.{dtype})  # in the place of vision.onnx's and speech.onnx's features
features = {{"image_features": absent, "speech_features": absent}}
embeds = embedding.run(None, {{"input_ids": ids, **features}})[0]

past = {{
    f"past_key_values.{{layer}}.{{part}}": np.zeros((1, {heads}, 0, {head_size}), np.{dtype})
    for layer in range({layers})
    for part in ("key", "value")
}}
inputs = {{
    "inputs_embeds": embeds,
    "attention_mask": np.ones_like(ids),
    "position_ids": np.arange(ids.size)[None],{gates}
}}
logits, *present = decoder.run(None, {{**inputs, **past}})  # present: the next call's past_key_values"""

_LICENCE = """## Licence

The weights stay under the licence of the model they come from; that of Phi-4-multimodal-instruct is MIT.
"""


def model_card(package: Package, *, source: str, revision: str | None) -> str:
    """The text of the card: the same for the same package, wherever and whenever it is made.

    Args:
        package: written, and validated where that was asked for.
        source: the Hub id or folder that was exported; of a folder only its last part is told.
        revision: of a Hub id; None is its main branch.

    Returns:
        Markdown with the Hub's YAML front matter.
    """
    is_folder = Path(source).exists()
    name = Path(source).resolve().name if is_folder else source
    sections = [
        _front_matter(None if is_folder else name),
        _head(package, name if is_folder or revision is None else f"{name}, revision {revision}"),
        "\n".join(["## Models", "", *_files(package), "", *_tensors(package)]),
        _GATES if "adapter_gates" in package["model"].inputs else "",
        _differences(package),
        _run(package),
        _LICENCE,
    ]
    return "\n".join(f"{section.strip()}\n" for section in sections if section)


def _front_matter(hub_id: str | None) -> str:
    lines = ["license: mit", "library_name: onnx", "pipeline_tag: image-text-to-text"]
    if hub_id is not None:
        lines.append(f"base_model: {hub_id}")
    return "\n".join(["---", *lines, "tags:", "- onnx", "- onnxruntime", "- phi4_multimodal", "---"])


def _head(package: Package, source: str) -> str:
    return f"""# Phi-4-multimodal for ONNX Runtime

Four ONNX models, exported from {source} by optimum-phi4mm.

- variant `{package.variant}`: {Phi4MMOnnxConfig.VARIANTS[package.variant]}
- float type {_DTYPES[package.dtype]}
"""


def _files(package: Package) -> Iterator[str]:
    """Rows of the table of files."""
    yield "| file | what it does | graph | weights |"
    yield "|---|---|---|---|"
    for key, model in package.items():
        graph, weights = (_size(file) for file in (model.path, model.path.with_suffix(".onnx_data")))
        yield f"| `{model.path.name}` | {_PURPOSES[key]} | {graph} | {weights} |"


def _size(file: Path) -> str:
    """The size of a file in decimal units, as disks are sold."""
    size = float(file.stat().st_size) if file.exists() else 0.0
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def _tensors(package: Package) -> Iterator[str]:
    """Rows of the table of inputs and outputs."""
    yield "| model | | name | type | shape | if left out |"
    yield "|---|---|---|---|---|---|"
    for key, model in package.items():
        for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
            for name, tensor in _grouped(tensors).items():
                shape = ", ".join(map(str, tensor.shape))
                default = _DEFAULTS.get(name, "has a default") if tensor.optional else ""
                yield f"| {key} | {kind} | `{name}` | {tensor.dtype} | [{shape}] | {default} |"


def _grouped(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors with the layers' caches as one: `present.0...31.key/.value`."""
    grouped: dict[str, TensorInfo] = {}
    matches = {name: match for name in tensors if (match := _CACHE.fullmatch(name))}
    last = max((int(match[2]) for match in matches.values()), default=0)
    for name, tensor in tensors.items():
        label = f"{matches[name][1]}.0...{last}.key/.value" if name in matches else name
        grouped.setdefault(label, tensor)
    return grouped


def _differences(package: Package) -> str:
    """What validation found."""
    heading = "## Validation\n\n"
    if all(model.differences is None for model in package.values()):
        reason = (
            "ONNX Runtime's CPU provider has no bfloat16 kernels"
            if package.dtype == "bf16"
            else "the export was asked not to validate"
        )
        return f"{heading}Outputs were not run: {reason}."
    rows = "\n".join(_largest_differences(package))
    return (
        f"{heading}Largest absolute difference to the torch model, which computes in float32 with the same "
        f"weights, on random inputs:\n\n| model | output | at most |\n|---|---|---|\n{rows}"
    )


def _largest_differences(package: Package) -> Iterator[str]:
    for key, model in package.items():
        if model.differences is None:
            yield f"| {key} | | not run |"
            continue
        largest: dict[str, float] = {}
        for name, difference in model.differences.items():
            match = _CACHE.fullmatch(name)
            label = f"{match[1]}.*" if match else name
            largest[label] = max(difference, largest.get(label, 0.0))
        for label, difference in largest.items():
            yield f"| {key} | `{label}` | {_at_most(difference)} |"


def _at_most(difference: float) -> str:
    """The next power of ten: rounding errors vary with threads and processors, and the card shall not."""
    return f"1e{math.ceil(math.log10(difference)):+03d}" if difference else "0"


def _run(package: Package) -> str:
    """How to get an answer, and how to run the graphs themselves, with the package's own sizes."""
    if package.dtype == "bf16":
        return (
            "## Run\n\nbfloat16 graphs need an execution provider that has its kernels; ONNX Runtime's CPU "
            "provider can't load them."
        )
    model: PackagedModel = package["model"]
    caches = [tensor for name, tensor in model.inputs.items() if name.startswith("past_key_values.")]
    _, heads, _, head_size = caches[0].shape
    gates = '\n    "adapter_gates": np.zeros((1, 2), np.float32),  # text only'
    code = _SNIPPET.format(
        hidden=model.inputs["inputs_embeds"].shape[2],
        dtype=_DTYPES[package.dtype],
        heads=heads,
        head_size=head_size,
        layers=len(caches) // 2,
        gates=gates if "adapter_gates" in model.inputs else "",
    )
    marker, argument, text = _MEDIA.get(package.variant, _PICTURE)
    answer = _ANSWER.format(marker=marker, argument=argument, text=text)
    return (
        "## Run\n\nFrom this folder, or with the repository's id in the place of each dot:\n\n"
        f"```python\n{answer}\n```\n\n"
        f"With ONNX Runtime alone, the logits of a text prompt:\n\n```python\n{code}\n```"
    )
