"""Masks as SpecForge and speculators make them, in an environment that has them.

usage: python masks_of_trainers.py TRAINER < {"tokenizer": folder, "template": SpecForge's name, "conversations": [...]}

Prints JSON: a list of [input_ids, loss_mask], for speculators one an assistant's turn.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from transformers import AutoTokenizer

LONGEST = 1 << 20


def specforge(tokenizer, asked):
    from specforge.data.preprocessing import preprocess_conversations
    from specforge.data.template import TEMPLATE_REGISTRY

    chats = asked["conversations"]
    made = preprocess_conversations(
        tokenizer, chats, TEMPLATE_REGISTRY.get(asked["template"]), max_length=LONGEST, tools=[[]] * len(chats)
    )
    return [[ids[0].tolist(), mask[0].tolist()] for ids, mask in zip(made["input_ids"], made["loss_mask"], strict=True)]


def speculators(tokenizer, asked):
    import datasets
    from speculators.data_generation.preprocessing import build_speculator_training_dataset

    class Render(BaseHTTPRequestHandler):
        """vLLM's /v1/chat/completions/render: the tokenizer's own template, no more."""

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = tokenizer.apply_chat_template(
                body["messages"], tokenize=False, add_generation_prompt=body["add_generation_prompt"]
            )
            data = json.dumps({"token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Render)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rows = datasets.Dataset.from_list([{"conversations": chat} for chat in asked["conversations"]])
    endpoint = f"http://127.0.0.1:{server.server_port}"
    made = build_speculator_training_dataset(rows, tokenizer, LONGEST, None, render_endpoint=endpoint)
    return [[row["input_ids"].tolist(), row["loss_mask"].tolist()] for row in made]


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    trainer = {"specforge": specforge, "speculators": speculators}[sys.argv[1]]
    out, sys.stdout = sys.stdout, sys.stderr
    masks = trainer(AutoTokenizer.from_pretrained(asked["tokenizer"]), asked)
    json.dump(masks, out)
