// matmul_algorithms.h - the fastest algorithm of each matrix product, as measured by a search, in a JSON
// file.
//
//   {"matmul_algorithms": 1,
//    "machines": {"NVIDIA H200, cuBLASLt 130002": {"512 x 768 x 3072 NN bias ...": {
//        "algorithm": "<128 hexadecimal digits>", "microseconds": 12.3, "bias_gradient": false}}}}
//
// An algorithm is the content of cuBLASLt's cublasLtMatmulAlgo_t, which only the same version of the library
// understands; so entries are kept by machine, and those of other machines stay as they are. A run that is
// given the same file makes the same choices, and so has the same bits.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include "llmc/error.h"
#include "llmc/file.h"

struct MatmulAlgorithm {
    std::array<uint64_t, 8> data = {};  // cuBLASLt's
    double microseconds = 0;            // as measured
    bool bias_gradient = false;         // whether it also sums b's columns
};

// The fastest of those measured, the first among equals. There must be at least one.
inline const MatmulAlgorithm& fastest(const std::vector<MatmulAlgorithm>& measured) {
    return *std::ranges::min_element(
        measured, [](const auto& a, const auto& b) { return a.microseconds < b.microseconds; });
}

// The algorithms in a file for one machine. Products are identified by text.
class MatmulAlgorithms {
  public:
    // Reads the file; without one, starts empty. `machine` names the GPU and the library's version. Fails
    // with the file's name and what is wrong in it.
    MatmulAlgorithms(std::string path, std::string machine)
        : path_(std::move(path)), machine_(std::move(machine)) {
        if (file_exists(path_)) file_ = read_json(path_);
        check(file_.is_object() && file_.contains("matmul_algorithms"), "is no file of matmul algorithms");
        check(file_["matmul_algorithms"] == kFormat, "is of a format that this program does not know");
        check(file_.contains("machines") && file_["machines"].is_object(), "has no \"machines\"");
        nlohmann::json& mine = file_["machines"][machine_];
        if (mine.is_null()) mine = nlohmann::json::object();
        check(mine.is_object(), "lists no products for " + printable(machine_));
        for (const auto& [product, entry] : mine.items()) known_[product] = parse(product, entry);
    }

    const std::string& path() const { return path_; }
    size_t size() const { return known_.size(); }
    // Null if the file has none for this product.
    const MatmulAlgorithm* find(const std::string& product) const {
        const auto it = known_.find(product);
        return it == known_.end() ? nullptr : &it->second;
    }
    void add(const std::string& product, const MatmulAlgorithm& a) {
        std::string digits;
        for (uint64_t word : a.data) digits += format("%016lx", word);
        file_["machines"][machine_][product] = {
            {"algorithm", digits}, {"microseconds", a.microseconds}, {"bias_gradient", a.bias_gradient}};
        known_[product] = a;
    }
    // Writes the whole file, so that a crash leaves the old one or the new one. Runs that save at the same
    // time do not merge their entries: the last one's file stays.
    void save() const { replace_text(path_, file_.dump(1) + "\n"); }

  private:
    static constexpr int kFormat = 1;

    void check(bool good, const std::string& wrong) const {
        if (!good) fail("%s: %s", path_, wrong);
    }
    MatmulAlgorithm parse(const std::string& product, const nlohmann::json& entry) const {
        const std::string of = format(" of \"%s\"", printable(product));
        auto member = [&](const char* name) {
            check(entry.is_object() && entry.contains(name), format("no \"%s\"", name) + of);
            return entry[name];
        };
        const nlohmann::json digits = member("algorithm"), time = member("microseconds"),
                             fused = member("bias_gradient");
        MatmulAlgorithm a;
        const std::string text = digits.is_string() ? digits.get<std::string>() : "";
        check(text.size() == 16 * a.data.size() &&
                  text.find_first_not_of("0123456789abcdef") == std::string::npos,
              "the \"algorithm\"" + of + " is not 128 hexadecimal digits");
        for (size_t i = 0; i < a.data.size(); i++)
            a.data[i] = std::stoull(text.substr(16 * i, 16), nullptr, 16);
        check(time.is_number(), "the \"microseconds\"" + of + " are no number");
        a.microseconds = time.get<double>();
        check(fused.is_boolean(), "the \"bias_gradient\"" + of + " is neither true nor false");
        a.bias_gradient = fused.get<bool>();
        return a;
    }

    std::string path_, machine_;
    nlohmann::json file_ = {{"matmul_algorithms", kFormat}, {"machines", nlohmann::json::object()}};
    std::map<std::string, MatmulAlgorithm> known_;  // this machine's
};
