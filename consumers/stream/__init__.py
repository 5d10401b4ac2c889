"""Rows for another process, such as a trainer on another machine: Arrow record batches over a socket.

::

    with StreamReader("tcp://engine.example:5555", sites="12.post_mlp", batch_size=4096) as rows:
        for batch in rows:
            step(batch.torch())  # [4096, hidden]

The reader needs ``pip install 'headgate[stream]'``, and neither vLLM nor a GPU.
"""

from headgate.consumers.stream.batches import StreamBatch
from headgate.consumers.stream.consumer import StreamConsumer
from headgate.consumers.stream.errors import StreamError, StreamGapError, StreamRefusedError
from headgate.consumers.stream.reader import StreamReader

__all__ = ["StreamBatch", "StreamConsumer", "StreamError", "StreamGapError", "StreamReader", "StreamRefusedError"]
