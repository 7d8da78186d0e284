"""Models whose forward pass is the transformers library's, with this engine's linear layers, experts and attention in it.

    transformers          configuration, module tree, reading and renaming of weights, norms, rotary embeddings, routers
    this engine           every linear layer and every expert (layers.py, experts.py), all other products of matrices
                          (products.py), attention over the paged KV cache (attention.py)

A model runs one flat batch [1, tokens] of all rows with position ids, without a cache of the library's and without a mask.
torch's own products give a token other bits when the number of rows differs; the engine's do not. So a reply does not depend on
the requests beside it, nor on evictions, as long as the module tree has no other operation that mixes tokens.
"""
