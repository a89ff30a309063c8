"""The file optimum-cli looks for: makes Phi-4-multimodal known to `optimum-cli export onnx`."""

from optimum_phi4mm import registration


registration.wrap_command()

REGISTER_COMMANDS: list = []
