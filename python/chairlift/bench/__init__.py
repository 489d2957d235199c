"""Load for any OpenAI-compatible server, and what came of it.

1. ``lengths``, ``tenants``, ``trace`` and ``workload`` say which requests are sent, and when: all
   of it follows from the seed.
2. ``load`` sends them, in an open or a closed loop.
3. ``client`` reads each answer (``sse`` cuts the stream) into an *outcome*.
4. ``report`` makes figures of the outcomes.

It shares the machine with the server that it measures, so the way of a token is short.
"""
