// tokenizer_gguf_write.h - writes a tokenizer as the keys "tokenizer.ggml.*" of a GGUF file, as llama.cpp's
// converter does. tokenizer_gguf.h reads them.
//
// A byte-level tokenizer becomes the model "gpt2", whose pre-tokenizer has a name: those that llama.cpp knows
// are recognized by their components. SentencePiece's becomes the model "llama". Other tokenizers are
// refused, because the file would split text differently. The tokens of a model of bytes become those of a
// byte-level tokenizer without merges. A model without a tokenizer gets the model "none".
#pragma once

#include <map>
#include <string>

#include "llmc/gguf.h"
#include "llmc/model_config.h"

// The keys of a model's tokenizer: that of a GGUF file, or that in a folder; without either, that of a model
// of bytes, or none. `templates` are the chat templates that go with it, by name ("default" has none in a
// GGUF), and `end_of_turn` is the token that ends an answer, or -1 if that is the one that ends a text.
GgufKeys tokenizer_keys(const GgufFile* file, const std::string& folder, const ModelConfig& c,
                        const std::map<std::string, std::string>& templates, int end_of_turn);
