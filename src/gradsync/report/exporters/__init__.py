"""Traces for other people's tools: Perfetto, TensorBoard, Prometheus."""
