"""The generation loop: who shares a step, the KV cache, inputs, graphs, and the thread."""
