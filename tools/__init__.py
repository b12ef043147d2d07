"""Scripts of development. The product imports none of them."""
