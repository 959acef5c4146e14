"""Hugging Face's Trainer with evaluations and saves, as its examples use it.

torchrun --nproc-per-node 2 hugging_face.py out 300
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Numbers(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = (index * 7 + torch.arange(64)) % 256
        return {"input_ids": tokens, "labels": tokens}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations, and saves")
    parser.add_argument("--held-out", type=int, default=2048, help="examples of the evaluation")
    options = parser.parse_args()
    arguments = TrainingArguments(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        eval_strategy="steps",
        eval_steps=options.every,
        save_steps=options.every,
        save_total_limit=2,
        logging_steps=10,
        report_to="none",
        use_cpu=True,
        dataloader_num_workers=1,
    )
    set_seed(7)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Numbers(100_000),
        eval_dataset=Numbers(options.held_out),
    )
    trainer.train()
    print(trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()
