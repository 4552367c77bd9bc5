"""What `torch.onnx.export` needs to be told: decompositions and functional forms of operators."""
