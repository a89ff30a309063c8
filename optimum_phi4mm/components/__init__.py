"""What is computed: the model's parts as torch modules built on transformers' own layers. No ONNX in here."""
