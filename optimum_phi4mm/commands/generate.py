"""`optimum-cli phi4mm generate`: an answer from a package, as it comes or as JSON."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand

from ..errors import InputError, Phi4MMError


__all__ = ["GenerateCommand"]

_CHAT = "<|user|>{}<|end|><|assistant|>"  # for a package whose tokenizer has no chat template


class GenerateCommand(BaseOptimumCLICommand):
    """Streams an answer to the terminal, or prints it as one JSON object."""

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.add_argument("--model", required=True, help="Folder or Hub id of an exported package.")
        parser.add_argument(
            "--prompt",
            required=True,
            help="What is asked. Pictures and audio come before it, in their order, unless it names them as "
            "<|image_1|>, <|audio_1|>, ... A prompt that begins with <|user|> or <|system|> stays as it is.",
        )
        parser.add_argument(
            "--image", nargs="+", action="extend", default=[], metavar="FILE", help="Pictures: paths or URLs."
        )
        parser.add_argument(
            "--audio", nargs="+", action="extend", default=[], metavar="FILE", help="Recordings: likewise."
        )
        parser.add_argument("--max_new_tokens", type=int, default=512, help="Default 512.")
        parser.add_argument("--do_sample", action="store_true", help="Sample instead of the likeliest token.")
        parser.add_argument("--temperature", type=float, help="Of sampling; default: the package's.")
        parser.add_argument("--seed", type=int, default=0, help="Of sampling; default 0.")
        parser.add_argument("--provider", default="CPUExecutionProvider", help="ONNX Runtime provider.")
        parser.add_argument(
            "--json", action="store_true", help="Print one object: text, prompt_tokens, new_tokens, ..."
        )

    def run(self) -> None:
        try:
            self._run()
        except Phi4MMError as error:
            sys.exit(f"optimum-cli phi4mm generate: {error}")

    def _run(self) -> None:
        args = self.args
        if args.max_new_tokens < 1:
            raise InputError(f"--max_new_tokens is {args.max_new_tokens}, expected at least 1")
        from transformers import TextStreamer, set_seed

        from ..runtime.modeling import ORTModelForPhi4MM
        from ..runtime.processing import Phi4MMProcessor

        processor = Phi4MMProcessor.from_pretrained(args.model)
        inputs = processor(_prompt(processor, args), args.image or None, args.audio or None)
        model = ORTModelForPhi4MM.from_pretrained(args.model, provider=args.provider)
        options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": args.do_sample}
        if args.temperature is not None:
            options["temperature"] = args.temperature
        if not args.json:
            options["streamer"] = TextStreamer(
                processor.tokenizer, skip_prompt=True, skip_special_tokens=True
            )
        set_seed(args.seed)
        ids = inputs["input_ids"]
        answer = model.generate(**inputs, **options)[0, ids.shape[1] :]
        if args.json:
            content = {
                "text": processor.decode(answer, skip_special_tokens=True),
                "prompt_tokens": ids.shape[1],
                "image_tokens": int((ids == processor.image_token_id).sum()),
                "audio_tokens": int((ids == processor.audio_token_id).sum()),
                "new_tokens": len(answer),
            }
            print(json.dumps(content, ensure_ascii=False))


def _prompt(processor: Any, args: Any) -> str:
    if args.prompt.startswith(("<|user|>", "<|system|>")):
        return args.prompt
    markers = "".join(
        f"<|{kind}_{number + 1}|>"
        for kind, given in (("image", args.image), ("audio", args.audio))
        for number in range(len(given))
        if f"<|{kind}_" not in args.prompt
    )
    if processor.chat_template is None:
        return _CHAT.format(markers + args.prompt)
    message = {"role": "user", "content": markers + args.prompt}
    return processor.apply_chat_template([message], add_generation_prompt=True)
