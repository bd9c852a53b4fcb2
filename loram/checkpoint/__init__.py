"""Sharded safetensors as streams of tensors: read and write a model without ever holding it."""

from loram.checkpoint.format import Block, TensorSpec
from loram.checkpoint.reader import CheckpointReader, TensorInfo
from loram.checkpoint.writer import CheckpointWriter, copy_side_files, side_files

__all__ = [
    "Block",
    "CheckpointReader",
    "CheckpointWriter",
    "TensorInfo",
    "TensorSpec",
    "copy_side_files",
    "side_files",
]
