// residence_host.h - blocks that live in pinned host memory beside a GPU: each is copied to the device on a
// stream of its own whenever it is borrowed.
#pragma once

#include <functional>
#include <span>
#include <utility>

#include "llmc/residence.h"

class HostResidence : public Residence {
  public:
    // block(layer) is a block's bytes in pinned memory.
    explicit HostResidence(std::function<std::span<const char>(int layer)> block)
        : block_(std::move(block)) {}

    void start(int layer, char* room, Stream stream) override {
        const std::span<const char> from = block_(layer);
        free_.record(stream);
        free_.block(copies_.get());
        copy_async(room, from.data(), from.size(), copies_.get());
        arrived_.record(copies_.get());
    }
    void finish(Stream stream) override { arrived_.block(stream); }

  private:
    std::function<std::span<const char>(int)> block_;
    OwnStream copies_;
    Event free_, arrived_;
};
