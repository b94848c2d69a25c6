"""Turn a GGUF file into a Hugging Face folder: `python -m tokenmill_worker.gguf_conversion IN OUT`.

A process of its own, so that whoever prepares a model neither loads torch nor has to switch the
model hub off for itself.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of `gguf` into `folder`: bfloat16 safetensors, tokenizer, chat template.

    The weights are dequantized because the engine computes in ordinary dtypes; transformers ≥ 5.19
    would otherwise keep them packed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
