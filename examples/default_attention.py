"""How far transformers' default attention is from what the model is: run it on a picture without padding.

With "sdpa", transformers' vision layers say `is_causal=True` and pass no mask when no patch is padding, so
that a patch only sees the patches before it. The original model attends both ways, as "eager" and the
exported graph do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from demo import DATA, Case, relative_difference
from onnx_model import OnnxModel
from preprocess import Picture, read_picture
from transformers import AutoTokenizer
from transformers_model import TransformersModel


def without_padding(picture: Picture) -> Picture:
    """The picture's overview, as a picture that fills one crop."""
    overview = picture.pixel_values[[0, 0]]
    return Picture(overview, np.array([[448, 448]]), np.ones((2, 32, 32), dtype=bool))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path, help="folder that optimum-cli export onnx wrote, in float32")
    parser.add_argument("reference", type=Path, help="the same weights in transformers' own layout")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.package)
    padded = read_picture(DATA / "picture.jpg")
    package = OnnxModel(arguments.package)
    models = {
        "eager": TransformersModel(arguments.reference),
        "sdpa (default)": TransformersModel(arguments.reference, attention="sdpa"),
    }
    print("Image features, largest difference relative to transformers' eager ones")
    for name, picture in {
        "padded picture": padded,
        "picture without padding": without_padding(padded),
    }.items():
        case = Case("picture", tokenizer, picture, None)
        features = {"this package": package.image_features(picture)}
        for attention, model in models.items():
            with model.adapter_of(case.name):
                embeds = model.embed(**model.inputs(case.input_ids, picture, None))
            features[f"transformers, {attention}"] = embeds[case.is_image]
        expected = features.pop("transformers, eager")
        for source, found in features.items():
            print(f"{name:<24} {source:<28} {relative_difference(found, expected):.1e}")


if __name__ == "__main__":
    main()
