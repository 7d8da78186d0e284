"""The Triton side: tensor tables, parsing, the response pump, cancellation and metrics.

pb.py is the only module of the project that imports triton_python_backend_utils. The files
model_repository/*/1/model.py call assembly.py. Everything here runs in Triton's stub process, so it imports no torch, and
no thread but the text threads does work that could delay a stream. The threads are:

    main thread     runs execute(): it reads and checks each request, hands it over and returns at once
    text threads    `triton.text_threads` of them, and half as many for long texts, tokenise and hand the requests over
    engine reader   the executor's thread, which puts the engine's responses into the pump
    senders         `triton.sender_threads` of them detokenise, coalesce and send; each stream stays with one sender
    poller          asks Triton which live streams have been cancelled
    housekeeper     sends metrics and signs of life, refuses overdue text, watches the drain signal and the server process
"""
