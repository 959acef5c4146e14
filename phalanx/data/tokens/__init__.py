"""Token files: shards and their manifest on disk, read as one long row; those of nanoGPT and Megatron too."""
