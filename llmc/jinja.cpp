// jinja.cpp - evaluates the statements of a chat template. jinja_parser.h reads the source, jinja_builtins.h
// has filters, tests and methods. A template is not trusted: steps, memory and recursion are bounded.
#include "llmc/jinja.h"

#include <ctime>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/jinja_builtins.h"
#include "llmc/jinja_parser.h"
#include "llmc/jinja_values.h"

namespace jinja {

// A message of the template's as one line of bounded length.
std::string one_line(std::string text) {
    constexpr size_t kLongest = 400;
    if (text.size() > kLongest) text = text.substr(0, byte_of(text, kLongest / 4)) + "...";
    for (char& c : text)
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
    return text;
}

// A call of raise_exception(), with its message.
struct Raised : UserError {
    using UserError::UserError;
};

// The date as Python's strftime() writes it.
std::string date_text(const std::tm& date, const std::string& pattern) {
    std::string rest;  // without what a date without a time zone leaves empty
    for (size_t i = 0; i < pattern.size(); i++) {
        const bool is_field = pattern[i] == '%' && i + 1 < pattern.size();
        const std::string_view next = std::string_view(pattern).substr(i, is_field ? 2 : 1);
        rest += next == "%f" ? "000000" : next == "%z" || next == "%Z" ? "" : next;
        i += next.size() - 1;
    }
    if (rest.size() > 1000) fail("strftime_now(): the format is too long");
    std::string out(rest.size() * 100 + 1, '\0');
    out.resize(std::strftime(out.data(), out.size(), rest.c_str(), &date));
    return out;
}

// The variables of the template, a loop's body or a macro.
struct Scope {
    Scope* parent = nullptr;
    Variables variables;
    bool has_macros = false;  // a macro was made here, which may still read the variables
};

struct FunctionObject : Object {
    FunctionObject(std::string n, const Statement* m = nullptr, Scope* s = nullptr)
        : name(std::move(n)), macro(m), scope(s) {}
    const std::string name;
    const Statement* const macro;  // null: one of the functions that every template has
    Scope* const scope;            // where the macro was made
};

// One run of a template.
class Evaluator {
  public:
    Evaluator(const Variables& variables, const std::tm& date, size_t input_bytes, uint64_t* steps)
        : work_(input_bytes), steps_(steps), date_(date) {
        for (const char* name : {"range", "dict", "namespace", "raise_exception", "strftime_now"})
            globals_.variables.emplace_back(
                name, Value::object(Kind::Function, std::make_shared<FunctionObject>(name)));
        for (const auto& [name, value] : variables) assign(globals_, name, value);
    }

    ~Evaluator() {  // also where the template fails
        if (steps_) *steps_ += steps_before_ - work_.left();
    }
    Evaluator(const Evaluator&) = delete;

    Rendered run(const Statements& statements) {
        try {
            execute(statements);
        } catch (const LineError&) {
            throw;
        } catch (const Raised& error) {
            fail_at(line_, std::string("refuses this: ") + one_line(error.what()));
        } catch (const UserError& error) {
            fail_at(line_, error.what());
        }
        return {std::move(root_), std::move(generated_)};
    }

  private:
    enum class Flow { On, Break, Continue };
    static constexpr int kDeepestRun = 1500;  // most statements and expressions inside one another

    struct Deeper {
        explicit Deeper(Evaluator& e) : evaluator(e) {
            if (++e.depth_ > kDeepestRun) fail("the macros call each other too deeply");
        }
        ~Deeper() { evaluator.depth_--; }
        Evaluator& evaluator;
    };

    // ---- variables

    static void assign(Scope& scope, const std::string& name, Value value) {
        for (auto& [known, old] : scope.variables)
            if (known == name) {
                old = std::move(value);
                return;
            }
        scope.variables.emplace_back(name, std::move(value));
    }
    Value look_up(const std::string& name) const {
        for (const Scope* scope = scope_; scope; scope = scope->parent)
            for (const auto& [known, value] : scope->variables)
                if (known == name) return value;
        static const std::set<std::string_view> others = {"joiner", "cycler", "lipsum"};
        if (others.contains(name)) fail("%s() is not supported", name);
        if (macros_ > 0 && (name == "varargs" || name == "kwargs"))
            fail("the variable %s of a macro is not supported", name);
        return Value::undefined("'" + name + "' is undefined");
    }

    // A scope inside another one; while it exists, names are looked up and assigned in it.
    class Inside {
      public:
        Inside(Evaluator& e, Scope* parent) : evaluator_(e), outer_(std::exchange(e.scope_, scope_.get())) {
            scope_->parent = parent;
        }
        ~Inside() {
            evaluator_.scope_ = outer_;
            if (scope_->has_macros) evaluator_.kept_.push_back(std::move(scope_));
        }

      private:
        std::unique_ptr<Scope> scope_ = std::make_unique<Scope>();
        Evaluator& evaluator_;
        Scope* const outer_;
    };

    void assign(const Expression& target, const Value& value) {
        if (target.kind == ExpressionKind::Name) {
            work_.spend();
            return assign(*scope_, target.text, value);
        }
        if (target.kind == ExpressionKind::Attribute) {
            const Value space = look_up(target.parts[0]->text);
            if (!space.is(Kind::Namespace)) fail("cannot assign attribute on non-namespace object");
            return set_attribute(*space.as<NamespaceObject>().space, target.text, value);
        }
        const Values values = items_of(work_, value);
        if (values.size() != target.parts.size())
            fail("%s values to unpack (expected %zu, got %zu)",
                 values.size() < target.parts.size() ? "not enough" : "too many", target.parts.size(),
                 values.size());
        for (size_t i = 0; i < values.size(); i++) assign(*target.parts[i], values[i]);
    }
    static void set_attribute(Namespace& space, const std::string& name, const Value& value) {
        if (name.starts_with('_')) fail("a namespace cannot have the attribute \"%s\"", name);
        put(space.attributes, name, value);
    }

    // ---- statements

    Flow execute(const Statements& statements) {
        for (const auto& statement : statements)
            if (const Flow flow = execute(*statement); flow != Flow::On) return flow;
        return Flow::On;
    }

    Flow execute(const Statement& s) {
        const Deeper deeper(*this);
        line_ = s.line;
        work_.spend();
        switch (s.kind) {
            case StatementKind::Print:
                print(evaluate(*s.expression));
                break;
            case StatementKind::If:
                for (const auto& [condition, body] : s.branches)
                    if (!condition || evaluate(*condition).truth()) return execute(body);
                break;
            case StatementKind::For:
                return loop(s);
            case StatementKind::Set:
                assign(*s.target, evaluate(*s.expression));
                break;
            case StatementKind::SetBlock: {
                Value text;
                if (const Flow flow = capture(s.body, text); flow != Flow::On) return flow;
                assign(*s.target, filtered(s.expression.get(), text));
                break;
            }
            case StatementKind::Macro:
                for (Scope* scope = scope_; scope; scope = scope->parent) scope->has_macros = true;
                assign(*scope_, s.text,
                       Value::object(Kind::Function, std::make_shared<FunctionObject>(s.text, &s, scope_)));
                break;
            case StatementKind::Generation:
                generation(s);
                break;
            case StatementKind::Break:
                return Flow::Break;
            case StatementKind::Continue:
                return Flow::Continue;
        }
        return Flow::On;
    }

    void write(std::string_view text) {
        work_.spend(text.size());
        *out_ += text;
    }
    void print(const Value& v) { v.is_string() ? write(v.text()) : write(str(work_, v)); }

    // Puts the text that statements write into `result`. If they leave the loop around them, that is
    // returned.
    Flow capture(const Statements& body, Value& result) {
        const Inside inside(*this, scope_);
        std::string text;
        std::string* const outer = std::exchange(out_, &text);
        const Flow flow = execute(body);
        out_ = outer;
        result = new_string(work_, std::move(text));
        return flow;
    }

    void generation(const Statement& s) {
        if (out_ != &root_) fail("{%% generation %%} inside of a macro or a block is not supported");
        const Inside inside(*this, scope_);
        const size_t begin = root_.size();
        execute(s.body);
        if (generated_.empty() || generated_.back().end <= begin) generated_.push_back({begin, root_.size()});
    }

    Flow loop(const Statement& s) {
        Values items = items_of(work_, evaluate(*s.expression));
        if (s.condition) {
            Values chosen;
            for (const Value& one : items) {
                const Inside inside(*this, scope_);
                assign(*s.target, one);
                if (evaluate(*s.condition).truth()) chosen.push_back(one);
            }
            items = std::move(chosen);
        }
        const auto state = std::make_shared<LoopObject>();
        for (const Value& one : items) state->depth = std::max(state->depth, one.depth() + 1);
        state->items = std::move(items);
        const Value variable = Value::object(Kind::Loop, state);
        size_t& at = state->index;
        const size_t count = state->items.size();
        bool completes = false;  // an iteration came to its end; if none did, Jinja writes the else part too
        for (; at < count; at++) {
            const Inside inside(*this, scope_);
            assign(*scope_, "loop", variable);
            assign(*s.target, state->items[at]);
            const Flow flow = execute(s.body);
            completes = completes || flow == Flow::On;
            if (flow == Flow::Break) break;
        }
        at = std::min(at, std::max<size_t>(count, 1) - 1);  // as a namespace can keep the variable `loop`
        if (completes) return Flow::On;
        const Inside inside(*this, scope_);
        return execute(s.otherwise);  // `break` and `continue` there are those of the loop around this one
    }

    // ---- expressions

    Value evaluate(const Expression& e) {
        if (e.kind == ExpressionKind::Constant) return e.constant;
        if (e.kind == ExpressionKind::Name) return work_.spend(), look_up(e.text);
        const Deeper deeper(*this);
        line_ = e.line;
        work_.spend();
        switch (e.kind) {
            case ExpressionKind::Attribute:
                return attribute(work_, evaluate(*e.parts[0]), e.text);
            case ExpressionKind::Item: {
                const Value whole = evaluate(*e.parts[0]);
                return item(work_, whole, evaluate(*e.parts[1]));
            }
            case ExpressionKind::Call:
                return call(e);
            case ExpressionKind::Filter:
                return filter(e, evaluate(*e.parts[0]));
            case ExpressionKind::Test: {
                const Value tested = evaluate(*e.parts[0]);
                return Value::boolean(apply_test(work_, e.text, tested, arguments(e)));
            }
            case ExpressionKind::Compare:
                return Value::boolean(compares(e));
            case ExpressionKind::List:
            case ExpressionKind::Tuple:
            case ExpressionKind::Dict:
            case ExpressionKind::Slice:
                return evaluate_parts(e);
            case ExpressionKind::Arithmetic: {
                const Value left = evaluate(*e.parts[0]), right = evaluate(*e.parts[1]);
                line_ = e.line;
                return arithmetic(work_, e.text, left, right);
            }
            case ExpressionKind::Join: {
                std::string text;
                for (const ExpressionPtr& part : e.parts) text += str(work_, evaluate(*part));
                return new_string(work_, std::move(text));
            }
            default:
                return evaluate_logic(e);
        }
    }

    Value evaluate_logic(const Expression& e) {
        const Value first = evaluate(*e.parts[e.kind == ExpressionKind::Condition ? 1 : 0]);
        switch (e.kind) {
            case ExpressionKind::Not:
                return Value::boolean(!first.truth());
            case ExpressionKind::And:
                return first.truth() ? evaluate(*e.parts[1]) : first;
            case ExpressionKind::Or:
                return first.truth() ? first : evaluate(*e.parts[1]);
            case ExpressionKind::Condition:
                if (first.truth()) return evaluate(*e.parts[0]);
                if (e.parts[2]) return evaluate(*e.parts[2]);
                return Value::undefined(format("the inline if on line %d is false and has no else", e.line));
            default: {
                if (!first.is_number()) fail("bad operand type for unary -: '%s'", type_name(defined(first)));
                const bool negative = e.kind == ExpressionKind::Negative;
                return arithmetic(work_, "*", first, Value::integer(negative ? -1 : 1));
            }
        }
    }

    Value evaluate_parts(const Expression& e) {
        Values parts;
        for (const ExpressionPtr& part : e.parts) parts.push_back(part ? evaluate(*part) : Value::none());
        if (e.kind == ExpressionKind::Slice) return slice(work_, parts[0], parts[1], parts[2], parts[3]);
        if (e.kind != ExpressionKind::Dict)
            return new_list(work_, std::move(parts),
                            e.kind == ExpressionKind::List ? Kind::List : Kind::Tuple);
        Entries entries;
        for (size_t i = 0; i < parts.size(); i += 2) {
            if (parts[i].is(Kind::List) || parts[i].is(Kind::Dict))
                fail("unhashable type: '%s'", type_name(parts[i]));
            put(work_, entries, parts[i], parts[i + 1]);
        }
        work_.spend(entries.size() * sizeof(DictEntry));
        return Value::dict(std::move(entries));
    }

    bool compares(const Expression& e) {
        Value left = evaluate(*e.parts[0]);
        for (size_t i = 0; i < e.operators.size(); i++) {
            Value right = evaluate(*e.parts[i + 1]);
            line_ = e.line;
            if (!compare(work_, e.operators[i], left, right)) return false;
            left = std::move(right);
        }
        return true;
    }

    // ---- calls

    Arguments arguments(const Expression& e) {
        Arguments values;
        for (const Argument& a : e.arguments) {
            const Value value = evaluate(*a.value);
            if (a.name.empty())
                values.positional.push_back(value);
            else if (a.name == "*")
                std::ranges::copy(items_of(work_, value), std::back_inserter(values.positional));
            else if (a.name == "**")
                add_named(values, value);
            else
                values.named.emplace_back(a.name, value);
        }
        line_ = e.line;
        return values;
    }
    static void add_named(Arguments& values, const Value& dict) {
        if (!dict.is(Kind::Dict)) fail("an argument after ** must be a mapping, not %s", type_name(dict));
        for (const DictEntry& e : dict.entries()) {
            if (!e.key.is_string()) fail("keywords must be strings");
            values.named.emplace_back(e.key.text(), e.value);
        }
    }

    Value filter(const Expression& e, const Value& value) {
        return apply_filter(work_, e.text, value, arguments(e));
    }
    // A block's text after its filters, the first of which has no value of its own.
    Value filtered(const Expression* filters, const Value& text) {
        if (!filters) return text;
        return filter(*filters, filtered(filters->parts[0].get(), text));
    }

    Value call(const Expression& e) {
        const Value function = evaluate(*e.parts[0]);
        const Arguments values = arguments(e);
        defined(function);
        if (function.is(Kind::Method)) return call_method(work_, function.as<MethodObject>(), values);
        if (!function.is(Kind::Function)) fail("'%s' object is not callable", type_name(function));
        const auto& object = function.as<FunctionObject>();
        if (object.macro) return call_macro(object, values);
        if (object.name == "raise_exception") throw Raised(str(work_, Parameters(values, {"message"}, 1)[0]));
        return about([&] { return object.name + "()"; }, [&] { return call_global(object.name, values); });
    }

    Value call_macro(const FunctionObject& macro, const Arguments& given) {
        const std::vector<Argument>& parameters = macro.macro->parameters;
        if (given.positional.size() > parameters.size())
            fail("macro '%s' takes not more than %zu argument(s)", macro.name, parameters.size());
        for (const auto& argument : given.named)
            if (std::ranges::find(parameters, argument.first, &Argument::name) == parameters.end())
                fail("macro '%s' takes no keyword argument '%s'", macro.name, argument.first);
        const Inside inside(*this, macro.scope);
        macros_++;
        for (size_t i = 0; i < parameters.size(); i++) {
            const auto& [name, usual] = parameters[i];
            const auto named = std::ranges::find(given.named, name, &std::pair<std::string, Value>::first);
            assign(*scope_, name,
                   i < given.positional.size()  ? given.positional[i]
                   : named != given.named.end() ? named->second
                   : usual                      ? evaluate(*usual)
                           : Value::undefined("parameter '" + name + "' was not provided"));
        }
        Value text;
        capture(macro.macro->body, text);
        macros_--;
        return text;
    }

    Value call_global(const std::string& name, const Arguments& a) {
        if (name == "strftime_now")
            return new_string(work_, date_text(date_, Parameters(a, {"format"}, 1).text(0)));
        if (name == "range") return range(a);
        Entries entries;
        for (const Value& from : a.positional) {
            if (!from.is(Kind::Dict)) fail("needs a dict, not %s", type_name(defined(from)));
            for (const DictEntry& e : from.entries()) put(work_, entries, e.key, e.value);
        }
        for (const auto& [key, value] : a.named) put(entries, key, value);
        work_.spend(entries.size() * sizeof(DictEntry));
        if (name == "dict") return Value::dict(std::move(entries));
        Namespace& space = *namespaces_.emplace_back(std::make_unique<Namespace>());
        for (const DictEntry& e : entries) set_attribute(space, str(work_, e.key), e.value);
        return Value::object(Kind::Namespace, std::make_shared<NamespaceObject>(&space));
    }

    Value range(const Arguments& a) {
        constexpr int64_t kMost = 100'000;  // as in Jinja's sandbox
        const Parameters p(a, {"start", "stop", "step"}, 1);
        const int64_t start = p.has(1) ? p.integer(0, 0) : 0, stop = p.integer(p.has(1) ? 1 : 0, 0);
        const int64_t step = p.integer(2, 1);
        if (step == 0) fail("arg 3 must not be zero");
        Values numbers;
        for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
            numbers.push_back(Value::integer(i));
            if (numbers.size() > kMost) fail("Range too big. The sandbox blocks ranges larger than 100000.");
            if (__builtin_add_overflow(i, step, &i)) break;
        }
        return new_list(work_, std::move(numbers), Kind::View);
    }

    Work work_;
    uint64_t* const steps_;
    const uint64_t steps_before_ = work_.left();
    const std::tm date_;
    std::vector<std::unique_ptr<Namespace>> namespaces_;
    std::vector<std::unique_ptr<Scope>> kept_;  // scopes that macros may still read
    Scope globals_, top_{&globals_, {}, false};
    Scope* scope_ = &top_;
    std::string root_;           // what the template writes
    std::string* out_ = &root_;  // where to write now
    std::vector<Span> generated_;
    int depth_ = 0, line_ = 1;
    int macros_ = 0;  // that are being called
};

// ---- a template

struct ReadStatements {
    Statements all;
};

Template::Template(std::string_view source) {
    constexpr size_t kLongest = 1 << 20;
    if (valid_utf8(source) < source.size()) fail("the chat template is not UTF-8");
    if (source.size() > kLongest) fail("the chat template has more than %zu KiB", kLongest >> 10);
    Parser parser(source);
    statements_ = std::make_shared<const ReadStatements>(ReadStatements{parser.parse()});
    has_generation_ = parser.has_generation();
}

Rendered Template::render(const Variables& variables, size_t input_bytes, const std::tm& date,
                          uint64_t* steps) const {
    Evaluator evaluator(variables, date, input_bytes, steps);
    return evaluator.run(statements_->all);
}

}  // namespace jinja
