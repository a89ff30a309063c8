"""Load time and peak memory of a session that answers text only, beside one that uses all four models.

python benchmarks/session.py PACKAGE
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path


DATA = Path(__file__).parents[1] / "examples" / "data"
PROMPTS = {
    "text only": "<|user|>Hello<|end|><|assistant|>",
    "all four": "<|user|><|image_1|><|audio_1|>a<|end|>",
}


def run(package: str, kind: str) -> None:
    from optimum_phi4mm import ORTModelForPhi4MM, Phi4MMProcessor

    processor = Phi4MMProcessor.from_pretrained(package)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    model = ORTModelForPhi4MM.from_pretrained(package)
    loaded = time.perf_counter()
    media = {} if kind == "text only" else {"images": DATA / "picture.jpg", "audio": DATA / "recording.flac"}
    model.generate(**processor(PROMPTS[kind], **media), max_new_tokens=2)
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resident = next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    found = {"load": loaded - start, "answer": end - loaded, "before": before / 1e6, "peak": peak / 1e6}
    found["resident"] = resident / 1e6
    print(json.dumps({**found, "models": model.sessions.loaded}))


def main() -> None:
    if len(sys.argv) == 3:
        return run(*sys.argv[1:])
    for kind in PROMPTS:
        ended = subprocess.run(
            [sys.executable, __file__, sys.argv[1], kind], capture_output=True, text=True, check=True
        )
        found = json.loads(ended.stdout.splitlines()[-1])
        print(
            f"{kind:10} from_pretrained {found['load']:.2f} s, prompt and 2 tokens {found['answer']:.2f} s, "
            f"peak {found['peak']:.2f} GB, at the end {found['resident']:.2f} GB ({found['before']:.2f} GB "
            f"before), {', '.join(found['models'])}"
        )
    return None


if __name__ == "__main__":
    main()
