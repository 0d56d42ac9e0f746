"""The tiny vision-language model that ships with tierwise, its tasks and its training.

A real LLaVA-style model (CLIP vision tower, Qwen2 decoder) of under 2 M parameters that
answers questions about handwritten digits, counting scenes and bar charts. Everything the
capability does to a large model it can be shown doing to this one, offline, on one core.

    tasks ----> batches ----> train ----> weights/ ----> build.load_tiny
    scenes and  packed, some  Muon and    safetensors,   the ordinary
    questions   with a noisy  AdamW       processor,     from_pretrained
                teacher                   model card

``evaluate`` asks the questions and counts. Nothing here needs network or torchvision.
"""
