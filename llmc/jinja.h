// jinja.h - runs chat templates: the part of the template language Jinja that they use, as transformers sets
// it up (an immutable sandbox, trim_blocks, lstrip_blocks, `break` and `continue`, `{% generation %}`,
// raise_exception(), strftime_now() and a tojson that escapes no HTML). A template writes what it would write
// there; what is not supported here fails naming it and the template's line.
//
//     const jinja::Template chat(source);
//     const std::string text = chat.render({{"messages", messages}, ...}, input_bytes, date).text;
//
// jinja_values.h has the values that a template is given; jinja.cpp runs it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/jinja_values.h"

namespace jinja {

using Variables = std::vector<std::pair<std::string, Value>>;

struct Span {
    size_t begin, end;  // in bytes
};

struct Rendered {
    std::string text;
    std::vector<Span> generated;  // what {% generation %} encloses
};

// A template that has been read.
class Template {
  public:
    // Fails naming the line if the source has an error or something that is not supported.
    explicit Template(std::string_view source);

    // What the template writes. `input_bytes` is about the size of the variables; the work that the template
    // may do grows with it. The steps that it takes, also where it fails, are added to `steps`.
    Rendered render(const Variables& variables, size_t input_bytes, const std::tm& date,
                    uint64_t* steps = nullptr) const;

    // True if the template says with {% generation %} what the assistant generates.
    bool has_generation() const { return has_generation_; }

  private:
    std::shared_ptr<const struct ReadStatements> statements_;
    bool has_generation_ = false;
};

}  // namespace jinja
