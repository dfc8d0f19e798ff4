"""What surrounds the payload of a data file, so that other programs open it as their own.

An *envelope* is a pure function from chunks to an image: bytes that are known when a save is
planned, and places of payloads. Rows of the index address payload
bytes, whatever is around them. There are two:

- `safetensors`: a header in front of all chunks (`holdfast.format.index.layout_image`).
- `torch_dist`: each chunk as the item of PyTorch DCP that `torch.save` would write
  (`torch_dist.py`), and files next to the data files that DCP and Megatron-core begin with.

The other modules describe what torch writes: pickles without the module that runs them
(`pickle_output.py`), ZIP archives (`torch_archive.py`), values and optimizers as PyTorch has them
(`plain_values.py`, `optimizer_trees.py`), and the metadata of DCP (`dcp_metadata.py`).
"""
