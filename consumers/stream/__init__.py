"""Rows for another process, such as a trainer on another machine: Arrow record batches over a socket.

::

    with StreamReader("tcp://engine.example:5555", sites="12.post_mlp", batch_size=4096) as rows:
        for batch in rows:
            step(batch.torch())  # [4096, hidden]

The reader needs ``pip install 'headgate[stream]'``, and neither vLLM nor a GPU.
"""

from headgate.consumers.stream.consumer import StreamConsumer
from headgate.consumers.stream.reader import StreamBatch, StreamReader
from headgate.consumers.stream.wire import StreamError, StreamGapError, StreamRefusedError

__all__ = ["StreamBatch", "StreamConsumer", "StreamError", "StreamGapError", "StreamReader", "StreamRefusedError"]
