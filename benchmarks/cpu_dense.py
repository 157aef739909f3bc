"""A dense train step on the CPU against transformers + torch.

pip install -e '.[peer]' && python benchmarks/cpu_dense.py
"""

from peers import Setup, main

SETUP = Setup(
    "qwen3",
    {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
)

if __name__ == "__main__":
    main(SETUP)
