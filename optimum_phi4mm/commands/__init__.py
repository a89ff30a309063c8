"""`optimum-cli phi4mm …`. Imported at every start of optimum-cli, so it imports nothing large."""

from __future__ import annotations

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from .generate import GenerateCommand
from .inspect import InspectCommand


__all__ = ["Phi4MMCommand"]


class Phi4MMCommand(BaseOptimumCLICommand):
    """`optimum-cli phi4mm`: shows its subcommands."""

    COMMAND = CommandInfo(name="phi4mm", help="Run and inspect exported Phi-4-multimodal packages.")
    SUBCOMMANDS = (
        CommandInfo(
            name="generate", help="Answer a prompt with pictures and audio.", subcommand_class=GenerateCommand
        ),
        CommandInfo(
            name="inspect", help="Show the four models of a package.", subcommand_class=InspectCommand
        ),
    )
