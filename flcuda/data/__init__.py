"""Data sets, image files and the batches made of them."""

from flcuda.data.chain import Dataset, fetch, sample_numbers
from flcuda.data.dataset import (
    ConcatDataset,
    ImageData,
    MergeDataset,
    ResampleDataset,
    TensorDataset,
    TransformDataset,
    checked_labels,
    digits,
    epoch_order,
    fashion_mnist,
    image_data,
    read_idx,
    synthetic,
)
from flcuda.data.decode import Decoder, decode
from flcuda.data.epochs import BatchDataset, DistributedDataset, ShuffleDataset, batch_indices, batches
from flcuda.data.folder import ImageFiles, image_files, image_folder
from flcuda.data.images import ImageBatch
from flcuda.data.prefetch import PrefetchDataset
from flcuda.data.sample import Sample
from flcuda.data.store import DecodedStore
from flcuda.data.transforms import (
    Augment,
    Compose,
    Draws,
    Flip,
    Normalize,
    PadCrop,
    Transform,
    channel_statistics,
)
from flcuda.errors import DecodeError

__all__ = [
    "Augment",
    "BatchDataset",
    "Compose",
    "ConcatDataset",
    "Dataset",
    "DecodeError",
    "DecodedStore",
    "Decoder",
    "DistributedDataset",
    "Draws",
    "Flip",
    "ImageBatch",
    "ImageData",
    "ImageFiles",
    "MergeDataset",
    "Normalize",
    "PadCrop",
    "PrefetchDataset",
    "ResampleDataset",
    "Sample",
    "ShuffleDataset",
    "TensorDataset",
    "Transform",
    "TransformDataset",
    "batch_indices",
    "batches",
    "channel_statistics",
    "checked_labels",
    "decode",
    "digits",
    "epoch_order",
    "fashion_mnist",
    "fetch",
    "image_data",
    "image_files",
    "image_folder",
    "read_idx",
    "sample_numbers",
    "synthetic",
]
