"""The filesystem consumer: captured rows as safetensors files, shards or raw files, and reading them again."""

from headgate.consumers.filesystem.consumer import FilesystemConsumer

__all__ = ["FilesystemConsumer"]
