"""A small Llama from scratch with Hugging Face's Trainer. Nothing in it knows of Phalanx.

    phalanx run --hosts 2 --workers-per-host 1 -- examples/run_hugging_face.py out 200
    torchrun --nproc-per-node 2 examples/run_hugging_face.py out 200

It takes up its newest checkpoint, as Hugging Face's own examples do, so it may be killed at any time
between two of them.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Numbers(torch.utils.data.Dataset):
    """Made-up text, so that nothing has to be downloaded: each sequence counts on from a number of its own."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        tokens = (index * 7 + torch.arange(64)) % 256
        return {"input_ids": tokens, "labels": tokens}


def main():
    """Train, and save the result."""
    output, steps = sys.argv[1], int(sys.argv[2])
    arguments = TrainingArguments(
        output,
        max_steps=steps,
        per_device_train_batch_size=2,
        save_steps=20,
        save_total_limit=2,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        seed=7,
    )
    set_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Numbers())
    last = get_last_checkpoint(output) if Path(output).is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()


if __name__ == "__main__":
    main()
