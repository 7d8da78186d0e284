"""The Triton side: tensor tables, parsing, the response pump, cancellation, metrics.

The only users of triton_python_backend_utils in the project are pb.py here and the adapters
model_repository/*/1/model.py. Everything that runs here runs in Triton's stub process: no torch, no transformers, no
work that a stream would notice.

    main thread     execute(): read, check, hand over; returns at once
    text threads    `triton.text_threads`; tokenise, render chat templates, hand over
    engine reader   one thread of the executor; puts responses into the pump
    senders         `triton.sender_threads`; a stream stays with one of them; detokenises, coalesces, sends
    poller          asks Triton which live streams were cancelled
    housekeeper     metrics, drain signal, sign of life, deadlines of text, watch on the server process
"""
