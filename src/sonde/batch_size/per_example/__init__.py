"""Exact squared norms of each example's gradient, from a layer's input and the gradient of its output."""
