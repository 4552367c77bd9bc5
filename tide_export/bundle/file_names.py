"""Names the files and folders of a bundle."""

MANIFEST_FILE = "tide.json"
GRAPH_FILE = "model.onnx"
DRAFTER_FILE = "drafter.onnx"  # holds its own weights; it reads the embedding in WEIGHTS_FILE
WEIGHTS_FILE = "model.onnx.data"
ROUTERS_FILE = "routers.safetensors"
REPORT_FILE = "report.html"  # with a picture of the same name beside it; if `export` calibrated the routers
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
BATCH_FOLDER = "batch"
SEGMENTS_FOLDER = "segments"
SEGMENTS_WEIGHTS_FILE = "weights.data"  # in SEGMENTS_FOLDER, shared by all networks there
EMBEDDING_FILE = f"{SEGMENTS_FOLDER}/embedding.data"  # the matrix of the networks' embedding input, row after row
PLANS_FOLDER = "engines"


def network_file(name: str) -> str:
    """Returns where a bundle keeps the segment network `name`."""
    return f"{SEGMENTS_FOLDER}/{name}.onnx"


def plan_file(name: str) -> str:
    """Returns where a bundle keeps the TensorRT plan of the segment network `name`."""
    return f"{PLANS_FOLDER}/{name}.engine"


def batch_file(name: str) -> str:
    """Returns the path of batch network `name` in a bundle; WEIGHTS_FILE, one folder up, has its weights."""
    return f"{BATCH_FOLDER}/{name}.onnx"
