"""The file optimum-cli looks for: Phi-4-multimodal for `export onnx`, and the command `phi4mm`."""

from optimum_phi4mm import registration
from optimum_phi4mm.commands import Phi4MMCommand


registration.wrap_command()

REGISTER_COMMANDS = [Phi4MMCommand]
