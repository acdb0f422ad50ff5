// data_documents.h - where the documents of a packed batch begin and end. Packed examples follow each other
// in a sequence; each has its own positions and attends only to itself.
#pragma once

#include "llmc/tensor.h"

// For a batch of B sequences of T tokens. All are absent if each sequence is one document.
struct Documents {
    Tensor<int> positions;         // (B, T): how many tokens of its document come before a token
    Tensor<int> ends;              // (B, T): the place in the sequence after the document's last token
    Tensor<int> rows_by_position;  // (B * T), with
    Tensor<int> position_starts;   // (T + 1): group_tokens() of the positions (data_feeder.h)
};
