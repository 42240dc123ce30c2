"""Train a small language model with MaxText's own trainer, on synthetic data."""

import os
import runpy
import sys
from pathlib import Path

import maxtext

SMALL = {
    "run_name": "small",
    "base_output_directory": "out",
    # It gives JAX its own folder, whatever the variable says.
    "jax_cache_dir": os.environ.get("JAX_COMPILATION_CACHE_DIR", "jax_cache"),
    "dataset_type": "synthetic",
    "enable_checkpointing": "false",
    "enable_goodput_recording": "false",
    "monitor_goodput": "false",
    "skip_jax_distributed_system": "true",
    "attention": "dot_product",
    "steps": "3",
    "per_device_batch_size": "1",
    "max_target_length": "64",
    "vocab_size": "512",
    "base_num_decoder_layers": "2",
    "base_emb_dim": "64",
    "base_mlp_dim": "128",
    "base_num_query_heads": "4",
    "base_num_kv_heads": "4",
    "head_dim": "16",
}

base = Path(maxtext.__path__[0], "configs", "base.yml")
sys.argv[1:] = [str(base), *(f"{name}={value}" for name, value in SMALL.items())]
runpy.run_module("maxtext.trainers.pre_train.train", run_name="__main__")
